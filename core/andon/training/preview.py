"""`andon check`: what a run would do, found out by doing everything but training."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from andon.backend.devices import placement
from andon.config.schema import Config
from andon.data.rows import repeated_texts
from andon.model.adapter import attach, trainable_parameters
from andon.model.build import build_base
from andon.step.plan import efficiency
from andon.training.material import Material, idleness, prepare
from andon.training.rows import unfit_model

_MOST_WORKERS = 8


def describe(config: Config) -> Iterator[str]:
    """Lines for a reader. Raises `InputError` for anything that a run of this configuration would refuse."""
    name, devices, note = placement(config.run.backend, config.run.workers, config.run.devices)
    material = prepare(config)
    model = attach(build_base(material.model), material.adapter, config.seed)
    yield _data(material)
    yield _texts(material)
    yield _model(model, material)
    yield _plan(material)
    more = f" and {len(devices) - _MOST_WORKERS} more" if len(devices) > _MOST_WORKERS else ""
    placed = f"{name}: {', '.join(map(str, devices[:_MOST_WORKERS]))}{more}"
    yield f"workers: {config.run.workers} ({placed}), {_use(material, config.run.workers)}"
    if unfit_model(config):
        yield unfit_model(config)
    idle = idleness(material.plan, config, config.run.workers)
    if idle:
        yield f"note: {idle}"
    if note:
        yield f"note: {note}"
    if material.tokenizer.truncated:
        limit = config.model.max_length
        yield f"note: {material.tokenizer.truncated} texts are cut to {limit} tokens (model.max_length)"


def _data(material: Material) -> str:
    held = f"{len(material.rows.validation_ids)} to validate, {len(material.evaluation_ids)} to evaluate on"
    return f"data: {len(material.plan.ids)} rows to train on, {held}; {len(material.labels)} classes"


def _texts(material: Material) -> str:
    rows = material.rows
    seen = f"{rows.seen_in_training()} of {len(rows.evaluated_on)} evaluation rows have a text that is also trained on"
    return f"texts: {seen}; {repeated_texts(rows.trained_on)} training rows repeat the text of an earlier one"


def _model(model: nn.Module, material: Material) -> str:
    trained = sum(parameter.numel() for parameter in trainable_parameters(model).values())
    total = sum(parameter.numel() for parameter in model.parameters())
    return f"model: {total:,} weights, {trained:,} of them trained (adapter: {material.adapter.kind})"


def _plan(material: Material) -> str:
    plan = material.plan
    ragged = len(plan.ids) % plan.batch_size
    last = f"; the last of an epoch has {ragged}" if ragged else ""
    return f"plan: {plan.total_steps} steps ({plan.steps_per_epoch} an epoch) of {plan.batch_size} rows{last}"


def _use(material: Material, workers: int) -> str:
    count = material.plan.micro_batches
    full = [str(world) for world in range(1, _MOST_WORKERS + 1) if efficiency(count, world) == 1]
    use = f"{count} micro-batches keep them busy {efficiency(count, workers):.0%} of the time"
    return use if efficiency(count, workers) == 1 else f"{use} ({', '.join(full)} workers: 100%)"
