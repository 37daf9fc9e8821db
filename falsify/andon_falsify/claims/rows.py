"""Which rows are trained on: each once in an epoch, in content too, in updates of the planned size, as planned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from andon_falsify.checkers import plan_followed, samples_once
from andon_falsify.claims.evidence import Evidence
from andon_falsify.history import MAX_LINES, History, RowId, RowSet
from andon_falsify.verdict import Verdict, not_applicable, unknown


def samples(evidence: Evidence) -> Verdict:
    """The rows that ranks were seen to train on, or that are told: of a known plan, of a loop, or of a script.

    A script tells which rows its ranks had and not what was planned, so its epochs are read off its visits.
    """
    history = evidence.told
    if evidence.of_loop:
        from andon_falsify.claims.loop_rows import recognised

        return recognised(evidence)
    if evidence.of_script:
        return samples_once.check_visits(history)
    if history.start is not None and history.start.watched and not any(step.ids for step in history.steps):
        return not_applicable(samples_once.CLAIM, "the loop told its watch no rows (w.batch)")
    return samples_once.check(history)


def plan(evidence: Evidence) -> Verdict:
    """The rows of every update against the published rule: of the case, or of what a ledger says was planned."""
    if evidence.trace is not None:
        from andon_falsify.claims.trainer_law import planned as planned_by_case

        return plan_followed.check(evidence.told, planned_by_case(evidence.trace.case))
    history = evidence.told
    if not evidence.settings:
        return not_applicable(plan_followed.CLAIM, "the ledger lies beside no configuration of our trainer")
    if evidence.settings.get("training.group_by_length"):
        return not_applicable(plan_followed.CLAIM, "rows were grouped by their length, which the ledger does not hold")
    found, start = planned(history, packed=bool(evidence.settings.get("training.packing"))), history.plan
    if found is None and (start.seed is None or not start.batch_size or not start.steps or not start.rows):
        why = "the start line lacks a part of the rule: seed, batch size, rows or updates"
        return not_applicable(plan_followed.CLAIM, why)
    if found is None:
        later = any(event.epoch for event in history.steps)
        first = "the first epoch did not visit every planned row" if later else "no epoch was complete"
        return unknown(plan_followed.CLAIM, f"{first}, so that the rows that the rule shuffles are not known")
    return plan_followed.check(history, found)


def planned(history: History, *, packed: bool = False) -> Mapping[int, Sequence[RowId]] | None:
    """The rows of every update by the published rule.

    The training rows are those that the first epoch visited, if it was complete; None if the rule lacks a part.
    packed: rows are packs, and an epoch has as many updates as the first.
    """
    plan = history.plan
    visited, updates = RowSet(), 0
    for event in history.trajectory.values():
        if event.epoch == 0:
            visited.add(row for row in event.ids if isinstance(row, int))
            updates += 1
    if plan.seed is None or not plan.batch_size or not plan.steps or len(visited) != plan.rows:
        return None
    # However many a line speaks of: no history has more lines, and of those that lack a thousand are enough.
    steps = min(plan.steps, max(history.trajectory, default=0) + 1000, MAX_LINES)
    rows = visited.integers()
    return plan_followed.PublishedPlan(rows, plan.seed, plan.batch_size, steps, updates if packed else None)
