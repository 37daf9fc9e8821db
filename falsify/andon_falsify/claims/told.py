"""What is told of every update, by whoever made it: its numbers are finite, and its learning rate the planned one."""

from __future__ import annotations

from dataclasses import replace

from andon_falsify.checkers import loss_finite, schedule
from andon_falsify.claims.evidence import Evidence
from andon_falsify.history import StepEvent
from andon_falsify.verdict import Verdict


def rates(evidence: Evidence) -> Verdict:
    """The learning rate of every update against the schedule.

    Of our trainer that is the published one, from the case or from the configuration beside a ledger; of a loop the one
    that it declares, or the case's rate throughout in every group; and it must be the same on all ranks.
    """
    if evidence.of_loop:
        from andon_falsify.claims.update import declared_rates

        return declared_rates(evidence.sightings)
    if evidence.trace is not None:
        from andon_falsify.claims.trainer_law import rate_law

        return schedule.check(evidence.told, rate_law(evidence.trace.case))
    total = evidence.told.plan.steps
    numbers = [evidence.settings.get(key) for key in ("optimizer.lr", "schedule.warmup_fraction", "schedule.min_lr")]
    peak, fraction, low = (float(number) if isinstance(number, int | float) else None for number in numbers)
    if peak is None or fraction is None or low is None or not total:
        return schedule.check(evidence.told, None)
    return schedule.check(evidence.told, schedule.WarmupCosine(peak, total, fraction, low))


def finite(evidence: Evidence) -> Verdict:
    """Every loss and norm that is told; of a loop whose loss is told now and then, the updates with one."""
    history = evidence.told
    if evidence.of_loop:
        told = [event for event in history.events if not (isinstance(event, StepEvent) and event.loss is None)]
        return loss_finite.check(replace(history, events=tuple(told)))
    return loss_finite.check(history)
