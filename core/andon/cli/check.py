"""`andon check`: what a run would do, found out by doing everything but training."""

from __future__ import annotations

from collections.abc import Iterator

from andon.backend.devices import placement
from andon.config.schema import Config
from andon.model.adapter import attach, trainable_parameters
from andon.model.build import build_base
from andon.step.plan import efficiency
from andon.training.material import prepare


def describe(config: Config) -> Iterator[str]:
    """Lines for a reader. Raises `InputError` for anything that a run of this configuration would refuse."""
    name, devices, note = placement(config.run.backend, config.run.workers, config.run.devices)
    material = prepare(config)
    model = attach(build_base(material.model), material.adapter, config.seed)
    trainable = sum(parameter.numel() for parameter in trainable_parameters(model).values())
    total = sum(parameter.numel() for parameter in model.parameters())
    plan = material.plan
    share = efficiency(plan.micro_batches, config.run.workers)
    ragged = len(plan.ids) % plan.batch_size
    yield f"data: {len(plan.ids)} rows to train on, {len(material.rows.validation_ids)} to validate, "
    yield f"      {len(material.evaluation_ids)} to evaluate on, {len(material.labels)} classes"
    yield f"model: {total:,} weights, {trainable:,} of them trained ({material.adapter.kind})"
    yield f"plan: {plan.total_steps} steps of {plan.batch_size} rows ({plan.steps_per_epoch} an epoch, {plan.epochs} epochs)"
    if ragged:
        yield f"      the last step of an epoch has {ragged} rows; every row counts once"
    yield f"workers: {config.run.workers} ({name}: {', '.join(map(str, devices))}), {plan.micro_batches} micro-batches, "
    yield f"      {share:.0%} of the workers' time is used"
    if note:
        yield f"note: {note}"
    for world in range(1, 9):
        if efficiency(plan.micro_batches, world) < 1:
            continue
        yield f"      {world} workers would use all of it"
