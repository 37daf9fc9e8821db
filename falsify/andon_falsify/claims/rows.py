"""Which rows are trained on: each once in an epoch, in content too, in updates of the planned size, as planned."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence

from andon_falsify.checkers import plan_followed, samples_once
from andon_falsify.claims.evidence import Evidence
from andon_falsify.history import History, RowId
from andon_falsify.verdict import Counterexample, Verdict, conclude, not_applicable, unknown

_ROWS_SHOWN = 6


def samples(evidence: Evidence) -> Verdict:
    """The rows that ranks were seen to train on, or that are told: of a known plan, of a loop, or of a script.

    A script tells which rows its ranks had and not what was planned, so its epochs are read off its visits.
    """
    history = evidence.told
    if evidence.of_loop:
        from andon_falsify.claims.loop_rows import recognised

        return recognised(evidence)
    if evidence.of_script:
        return samples_of_script(history)
    if history.start is not None and history.start.watched and not any(step.ids for step in history.steps):
        return not_applicable(samples_once.CLAIM, "the loop told its watch no rows (w.batch)")
    return samples_once.check(history)


def samples_of_script(history: History) -> Verdict:
    """Of R rows that are ever visited, every R visits in a row visit each once: epochs, whatever their borders."""
    claim = samples_once.CLAIM
    visits = [row for step in history.trajectory.values() for row in step.ids]
    if not visits:
        return not_applicable(claim, "the script tells no rows (w.batch)")
    rows, found, checked = set(visits), list[Counterexample](), 0
    for epoch, start in enumerate(range(0, len(visits), len(rows))):
        own = Counter(visits[start : start + len(rows)])
        checked += 1
        twice = Counter({row: times for row, times in own.items() if times > 1})
        if twice:
            lost = rows - own.keys()
            what = f"in visits {start + 1} to {start + own.total()} of {len(rows)} rows some came more than once"
            never = f"never {named_rows(Counter(lost))}, " if lost and own.total() == len(rows) else ""
            seen = f"{never}more than once {named_rows(twice)}"
            found.append(Counterexample(what, f"epoch {epoch}", "each once", seen))
            break
    return conclude(claim, checked, found)


def named_rows(rows: Counter[int | str]) -> str:
    """The first few of `rows` with how often each is there, and how many more there are."""
    order = sorted(rows, key=str)
    rest = f" and {len(order) - _ROWS_SHOWN} more" if len(order) > _ROWS_SHOWN else ""
    shown = ", ".join(f"{row} ({rows[row]} times)" if rows[row] > 1 else str(row) for row in order[:_ROWS_SHOWN])
    return f"{shown}{rest}"


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
    found, start = planned(history), history.plan
    if found is None and (start.seed is None or not start.batch_size or not start.steps or not start.rows):
        why = "the start line lacks a part of the rule: seed, batch size, rows or updates"
        return not_applicable(plan_followed.CLAIM, why)
    if found is None:
        later = any(event.epoch for event in history.steps)
        first = "the first epoch did not visit every planned row" if later else "no epoch was complete"
        return unknown(plan_followed.CLAIM, f"{first}, so that the rows that the rule shuffles are not known")
    return plan_followed.check(history, found)


def planned(history: History) -> Mapping[int, Sequence[RowId]] | None:
    """The rows of every update by the published rule, a shuffle keyed by (seed, epoch), cut into batches.

    The training rows are those that the first epoch visited, where it was complete; None where the rule lacks a part.
    """
    plan = history.plan
    first = [row for event in history.trajectory.values() if event.epoch == 0 for row in event.ids]
    rows = sorted(row for row in first if isinstance(row, int))
    if plan.seed is None or not plan.batch_size or not plan.steps or len(set(rows)) != plan.rows:
        return None
    batches: dict[int, Sequence[RowId]] = {}
    for epoch in range(plan.steps):
        order = list(rows)
        random.Random(f"andon order {plan.seed} {epoch}").shuffle(order)
        for start in range(0, len(order), plan.batch_size):
            if len(batches) == plan.steps:
                return batches
            batches[len(batches) + 1] = order[start : start + plan.batch_size]
    return batches
