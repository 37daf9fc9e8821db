"""What a user should know of a plan of batches before it is trained. Imports no torch."""

from __future__ import annotations

from andon.config.schema import Config
from andon.step.plan import BatchPlan, Schedule

_FEW_UPDATES = 100


def idleness(plan: BatchPlan, workers: int) -> str:
    """How many of these workers would never train on a row, and why; empty if every worker has rows."""
    idle = plan.idle_ranks(workers)
    rows = min(plan.batch_size, len(plan.ids))
    unit = "row" if plan.updates is None else "pack"
    why = f"an update has {rows} {unit}{'s' * (rows != 1)} in {plan.micro_batches} micro-batches"
    return f"{idle} of {workers} workers have no row in any update: {why}" if idle else ""


def few_updates(plan: BatchPlan, config: Config) -> str:
    """A note if a run on a pretrained base is so short that it will hardly have learned; else empty."""
    few = config.model.base is not None and config.training.max_steps is None and plan.total_steps < _FEW_UPDATES
    return f"note: {plan.total_steps} updates are few; for so few rows raise training.epochs" if few else ""


def learns_nothing(plan: BatchPlan, config: Config) -> str:
    """A warning if the only update of the run is the last of its schedule, whose rate is the lowest; else empty."""
    own, peak = config.schedule, config.optimizer.lr
    rate = Schedule(peak, plan.total_steps, own.warmup_fraction, own.min_lr, own.type, own.warmup_steps).rate(1)
    if plan.total_steps > 1 or rate >= peak:
        return ""
    return (
        f"warning: the run has one update, and its learning rate is {rate:g} (optimizer.lr is {peak:g}): the schedule "
        "ends at schedule.min_lr with the last update. Set training.epochs higher or training.batch_size lower, or "
        "schedule.type=constant for one update at the full rate"
    )
