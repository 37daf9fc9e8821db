"""Every update trains on the rows that an independently computed plan gives it, in that order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from andon_falsify.claims.evidence import Evidence
from andon_falsify.history import MAX_LINES, History, RowId, RowSet
from andon_falsify.reference.published import PublishedPlan
from andon_falsify.verdict import Claim, Clause, Counterexample, Verdict, conclude, not_applicable, unknown

CLAIM = Claim(
    "plan-followed",
    1,
    "Each global batch is the planned one, which depends only on seed, epoch and position.",
    order=30,
    subjects=("trainer", "ledger"),
    clauses=(Clause("updates-planned"),),
)


def check(evidence: Evidence) -> Verdict:
    """The plan is that of the case, or for a ledger that of its start line."""
    if evidence.trace is not None:
        from andon_falsify.claims.laws import planned_batches

        return check_history(evidence.history, planned_batches(evidence.trace.case))
    history = evidence.history
    if not evidence.settings:
        return not_applicable(CLAIM, "the ledger lies beside no configuration of our trainer")
    if evidence.settings.get("training.group_by_length"):
        why = "training.group_by_length is on, and the ledger has no row lengths, so the plan is unknown"
        return not_applicable(CLAIM, why)
    plan, start = planned(history, packed=bool(evidence.settings.get("training.packing"))), history.plan
    if plan is not None:
        return check_history(history, plan)
    if start.seed is None or not start.batch_size or not start.steps or not start.rows:
        return not_applicable(CLAIM, "the start line lacks a part of the rule: seed, batch size, rows or updates")
    later = any(event.epoch for event in history.steps)
    first = "the first epoch did not visit every planned row" if later else "no epoch was complete"
    return unknown(CLAIM, f"{first}, so that the rows that the rule shuffles are not known")


def planned(history: History, *, packed: bool = False) -> Mapping[int, Sequence[RowId]] | None:
    """The rows of every update of a ledger by the published rule, None if a part of the rule is unknown.

    The training rows are those that the first epoch visited, if it was complete. packed: rows are packs, and an epoch
    has as many updates as the first.
    """
    plan = history.plan
    visited, updates = RowSet(), 0
    for event in history.trajectory.values():
        if event.epoch == 0:
            visited.add(row for row in event.ids if isinstance(row, int))
            updates += 1
    if plan.seed is None or not plan.batch_size or not plan.steps or len(visited) != plan.rows:
        return None
    # A start line may name any number of steps. No history has more lines, and a thousand missing ones are enough.
    steps = min(plan.steps, max(history.trajectory, default=0) + 1000, MAX_LINES)
    return PublishedPlan(visited.integers(), plan.seed, plan.batch_size, steps, updates if packed else None)


def check_history(history: History, plan: Mapping[int, Sequence[RowId]]) -> Verdict:
    """Compare the rows of every update, repeated ones included, with `plan` (update from 1 -> rows in order).

    A history without an end is judged up to its last line. A run that ended must have made every planned update; if it
    says that it stopped early, every update up to its last.
    """
    found: list[Counterexample] = []
    owners: dict[int, int] = {}
    checked, missing = 0, ""

    def differs(what: str, step: int, expected: str, seen: str) -> None:
        found.append(Counterexample(what, f"step {step}", expected, seen, quantity="rows"))

    for event in history.steps:
        if not event.ids:
            missing = missing or f"step {event.number} lists no rows"
            continue
        checked += 1
        wanted = plan.get(event.number)
        if wanted is None:
            differs("an update that was not planned", event.number, "no update", _listed(event.ids))
        elif tuple(wanted) != event.ids:
            reordered = Counter(wanted) == Counter(event.ids)
            what = "the planned rows in another order" if reordered else "other rows than planned"
            # Made once: a published plan computes the order of an epoch for the first of its updates.
            if not owners:
                owners = {hash(tuple(rows)): step for step, rows in sorted(plan.items(), reverse=True)}
            owner = owners.get(hash(event.ids))
            what += "" if owner is None else f": those of step {owner}"
            differs(what, event.number, _listed(wanted), _listed(event.ids))
    if history.runs and history.runs[-1].finished:
        last = max(history.trajectory, default=0) if history.runs[-1].stopped_early else max(plan, default=0)
        absent = sorted(number for number in plan.keys() - history.trajectory.keys() if number <= last)
        if absent:
            differs(f"{len(absent)} planned updates were never made", absent[0], _listed(plan[absent[0]]), "no update")
    return conclude(CLAIM, checked, found, missing)


def _listed(rows: Sequence[RowId]) -> str:
    return f"[{' '.join(map(str, rows[:12]))}{' ...' if len(rows) > 12 else ''}]"
