"""`andon check`: reports what a run would do, by doing everything except training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch

from andon.backend.devices import placement
from andon.config.schema import Config
from andon.console.messages import InputError
from andon.data.rows import repeated_texts
from andon.model.adapter import trainable_parameters
from andon.model.build import facts_of
from andon.step.plan import efficiency
from andon.training.build import build_model
from andon.training.choices import automatic_keys, is_set, placed, value_of
from andon.training.material import (
    cut_note,
    cut_texts_note,
    eval_rows_note,
    few_updates,
    idleness,
    learns_nothing,
    prepare,
    warnings_of,
)
from andon.training.rows import class_counts, line_breaks, notes, skip_notes, task_notice, unfit_model

_MOST_WORKERS = 8


def describe(config: Config, row: int | None = None) -> Iterator[str]:
    """Lines on data, model, settings, plan and notes. row: one of the data to show token by token.

    Raises `InputError` for anything that a run of this configuration would refuse, and for a missing row.
    """
    original, (config, chosen) = config, placed(config)
    run = config.run
    name, devices, note = placement(run)
    material = prepare(config)
    config, rows, plan = material.config, material.rows, material.plan
    model = build_model(config, material.interface)
    material.task.require_fit(model, torch.device("cpu"))

    # The data
    own = f"{len(material.evaluation_ids)} to evaluate on"
    scored = "on which the result is scored too" if rows.evaluation is None else own
    held = f"{len(material.validation_ids)} to validate, {scored}"
    about = f"data: {len(rows.train_ids)} rows to train on, {held}; {rows.train.about() or f'task {rows.task}'}"
    yield from filter(None, (task_notice(original), about, class_counts(rows)))
    origins = rows.train.origins
    if rows.weights and origins is not None:
        kept_back = Counter(origins.file_of(id_) for id_ in rows.validation_ids)
        in_epoch = Counter(origins.file_of(rows.row_of(id_)) for id_ in rows.train_ids)
        for place, (file, size, weight) in enumerate(zip(origins.names(), origins.sizes, rows.weights, strict=True)):
            used = f"{size - kept_back[place]} of {size} rows to train on, weight {weight:g}"
            yield f"file {file}: {used}, {in_epoch[place]} in an epoch"
    seen = f"{rows.seen_in_training()} of {len(rows.evaluated_on)}"
    repeated = repeated_texts(rows.trained_on)
    first = f" (first: {rows.where(repeated[0][0])} has the text of {rows.where(repeated[0][1])})" if repeated else ""
    again = f"training rows with the text of an earlier one: {len(repeated)}{first if origins else ''}"
    yield f"texts: scored rows with the text of a training row: {seen}; {again}"

    # The model and its settings
    total, trained = (
        sum(weights.numel() for weights in each) for each in (model.parameters(), trainable_parameters(model).values())
    )
    yield f"model: {total:,} weights, {trained:,} of them trained (adapter: {config.adapter.kind})"
    yield from filter(None, (*facts_of(model).notes, *warnings_of(model, material.tokenizer), chosen))
    if config.model.base is not None:
        shown = ("adapter.kind", "adapter.r", "training.batch_size", *automatic_keys(config))
        marks = {key: "" if is_set(original, key) or key not in automatic_keys(config) else "*" for key in shown}
        listed = ", ".join(f"{key}={value_of(config, key)}{mark}" for key, mark in marks.items())
        yield f"settings: {listed} (*: chosen, since not set; docs/fine-tune.md lists the rules)"

    # The plan and its workers
    units = "packs" if config.training.packing else "rows"
    ragged = len(plan.ids) % plan.batch_size
    last = f"; the last of an epoch has {ragged}" if ragged else ""
    yield f"plan: {plan.total_steps} steps ({plan.steps_per_epoch} an epoch) of {plan.batch_size} {units}{last}"
    more = f" and {len(devices) - _MOST_WORKERS} more" if len(devices) > _MOST_WORKERS else ""
    where = f"{name}: {', '.join(map(str, devices[:_MOST_WORKERS]))}{more}"
    workers, busy = config.run.workers, efficiency(plan.micro_batches, config.run.workers)
    why = f"of the time, since {plan.micro_batches} micro-batches do not divide evenly"
    yield f"workers: {workers} ({where}){f', idle {1 - busy:.0%} {why}' if busy < 1 else ''}"

    # Notes
    yield from (*notes(rows), *filter(None, [line_breaks(rows)]), *skip_notes(material.unusable))
    yield from filter(None, (unfit_model(config), learns_nothing(plan, config), few_updates(plan, config)))
    for each in filter(None, (idleness(plan, workers), note, *material.task.notes)):
        yield f"note: {each}"
    cut = cut_note(material.evaluation_task, material.evaluation_ids, config)
    yield from filter(None, (cut_texts_note(material.tokenizer.truncated, config), cut, eval_rows_note(material)))
    if row is not None:
        count = len(material.unpacked)
        if not 0 <= row < count:
            raise InputError.at("--show-row", f"{row} is not one of the {count} rows, counted from 0")
        yield from filter(None, [rows.where(row)])
        yield from material.unpacked.shown(row, material.tokenizer)
