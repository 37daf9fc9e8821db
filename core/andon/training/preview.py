"""`andon check`: what a run would do, found out by doing everything but training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch
from torch import nn

from andon.backend.devices import placement
from andon.config.schema import Config
from andon.console.problems import InputError, Problem
from andon.data.rows import repeated_texts
from andon.model.adapter import trainable_parameters
from andon.model.build import facts_of
from andon.step.plan import efficiency
from andon.training.build import build_model
from andon.training.choices import automatic_keys, is_set, placed, settings_line
from andon.training.material import Material, cut_note, eval_rows_note, prepare, warnings_of
from andon.training.notices import few_updates, idleness, learns_nothing
from andon.training.rows import class_counts, notes, skip_notes, told_of_task, unfit_model

_MOST_WORKERS = 8


def describe(config: Config, row: int | None = None) -> Iterator[str]:
    """Lines for a reader; row: one of the data to show token by token.

    Raises `InputError` for anything that a run of this configuration would refuse, and for a row that is not there.
    """
    given, (config, chosen) = config, placed(config)
    run = config.run
    name, devices, note = placement(run.backend, run.workers, run.devices, fallback=run.cpu_fallback)
    material = prepare(config)
    config = material.config
    model = build_model(config, material.interface)
    material.task.require_fit(model, torch.device("cpu"))
    if told_of_task(config):
        yield told_of_task(config)
    yield _data(material)
    if classes := class_counts(material.rows):
        yield classes
    yield from _files(material)
    yield _texts(material)
    yield _model(model, material)
    yield from facts_of(model).notes
    yield from warnings_of(model, material.tokenizer)
    if chosen:
        yield chosen
    if config.model.base is not None:
        yield settings_line(config)
        values = {key: getattr(getattr(config, key.split(".")[0]), key.split(".")[1]) for key in automatic_keys(config)}
        unset = [f"{key}={values[key]}" for key in values if not is_set(given, key)]
        yield f"chosen, since not set (docs/usage.md says why): {', '.join(unset) or 'nothing'}"
    yield _plan(material)
    more = f" and {len(devices) - _MOST_WORKERS} more" if len(devices) > _MOST_WORKERS else ""
    where = f"{name}: {', '.join(map(str, devices[:_MOST_WORKERS]))}{more}"
    yield f"workers: {config.run.workers} ({where}), {_use(material, config.run.workers)}"
    yield from notes(material.rows)
    yield from skip_notes(material.unusable)
    if unfit_model(config):
        yield unfit_model(config)
    yield from filter(None, (learns_nothing(material.plan, config), few_updates(material.plan, config)))
    idle = idleness(material.plan, config.run.workers)
    if idle:
        yield f"note: {idle}"
    if note:
        yield f"note: {note}"
    for note in material.task.notes:
        yield f"note: {note}"
    if material.tokenizer.truncated:
        limit = config.model.max_length
        yield f"note: {material.tokenizer.truncated} texts are cut to {limit} tokens (model.max_length)"
    cut = cut_note(material.evaluation_task, material.evaluation_ids, config)
    yield from filter(None, (cut, eval_rows_note(material)))
    if row is not None:
        yield from _row(material, row)


def _data(material: Material) -> str:
    rows = material.rows
    apart = rows.evaluation is not None
    scored = f"{len(material.evaluation_ids)} to evaluate on" if apart else "on which the result is scored too"
    held = f"{len(material.validation_ids)} to validate, {scored}"
    return f"data: {len(rows.train_ids)} rows to train on, {held}; {rows.train.about()}"


def _files(material: Material) -> Iterator[str]:
    """A line for each of several files: its rows, how many of them are trained on, and how often in an epoch."""
    rows, origins = material.rows, material.rows.train.origins
    if not rows.weights or origins is None:
        return
    held = Counter(origins.file_of(id_) for id_ in rows.validation_ids)
    stand = Counter(origins.file_of(rows.row_of(id_)) for id_ in rows.train_ids)
    for place, (name, size, weight) in enumerate(zip(origins.names(), origins.sizes, rows.weights, strict=True)):
        kept = f"{size - held[place]} of {size} rows to train on, weight {weight:g}"
        yield f"file {name}: {kept}, {stand[place]} in an epoch"


def _row(material: Material, row: int) -> Iterator[str]:
    if not 0 <= row < len(material.validation_task):
        count = len(material.validation_task)
        raise InputError([Problem("--show-row", f"{row} is none of the {count} rows, which are counted from 0")])
    if material.rows.where(row):
        yield material.rows.where(row)
    yield from material.validation_task.shown(row, material.tokenizer)


def _texts(material: Material) -> str:
    rows = material.rows
    seen = f"{rows.seen_in_training()} of {len(rows.evaluated_on)} evaluation rows have a text that is also trained on"
    return f"texts: {seen}; {repeated_texts(rows.trained_on)} training rows repeat the text of an earlier one"


def _model(model: nn.Module, material: Material) -> str:
    trained = sum(parameter.numel() for parameter in trainable_parameters(model).values())
    total = sum(parameter.numel() for parameter in model.parameters())
    return f"model: {total:,} weights, {trained:,} of them trained (adapter: {material.config.adapter.kind})"


def _plan(material: Material) -> str:
    plan = material.plan
    ragged = len(plan.ids) % plan.batch_size
    units = "packs" if material.config.training.packing else "rows"
    last = f"; the last of an epoch has {ragged}" if ragged else ""
    return f"plan: {plan.total_steps} steps ({plan.steps_per_epoch} an epoch) of {plan.batch_size} {units}{last}"


def _use(material: Material, workers: int) -> str:
    count = material.plan.micro_batches
    full = [str(world) for world in range(1, _MOST_WORKERS + 1) if efficiency(count, world) == 1]
    use = f"{count} micro-batches keep them busy {efficiency(count, workers):.0%} of the time"
    return use if efficiency(count, workers) == 1 else f"{use} ({', '.join(full)} workers: 100%)"
