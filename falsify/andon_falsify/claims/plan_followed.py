"""Each update trains on the rows that an independently computed plan gives it, in that order."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import count, islice

from andon_falsify.history import History, RowId, StepEvent
from andon_falsify.verdict import Claim, Counterexample, Verdict, conclude, not_applicable

CLAIM = Claim(
    "plan-followed",
    1,
    "The global batch of every update is the planned one, a function of (seed, epoch, position) and of nothing else.",
)

_SHOWN = 12


def published(rows: Sequence[int], seed: int, batch_size: int, updates: int | None = None) -> Iterator[tuple[int, ...]]:
    """The global batches of our trainer by its published rule, epoch after epoch without end; none of no rows.

    A shuffle of `rows` keyed by (seed, epoch), cut into batches; the last of an epoch has what is left. updates: of an
    epoch of packs, which are dealt out so that earlier updates have at most one more.
    """
    sizes = [min(batch_size, len(rows) - at) for at in range(0, len(rows), batch_size)]
    if updates is not None:
        sizes = [len(range(first, len(rows), updates)) for first in range(updates)]
    for epoch in count() if rows else ():
        order = list(rows)
        random.Random(f"andon order {seed} {epoch}").shuffle(order)
        cuts = iter(order)
        yield from (tuple(islice(cuts, size)) for size in sizes)


def check(history: History, plan: Mapping[int, Sequence[RowId]] | None) -> Verdict:
    """Compare the rows of every update, repeated ones included, with `plan` (update from 1 -> rows in order).

    Not applicable without a plan. A history that was cut short is judged as far as it goes; one that ended must have
    made every planned update, and one that says that it stopped early every one up to its last.
    """
    if plan is None:
        return not_applicable(CLAIM, "no plan was given to compare with")
    found: list[Counterexample] = []
    checked, missing = 0, ""
    for event in history.steps:
        if not event.ids:
            missing = missing or f"step {event.number} lists no rows"
            continue
        checked += 1
        found += _batch(event, plan)
    if history.runs and history.runs[-1].finished:
        last = max(history.trajectory, default=0) if history.runs[-1].stopped_early else max(plan, default=0)
        absent = sorted(number for number in plan.keys() - history.trajectory.keys() if number <= last)
        if absent:
            what = f"{len(absent)} planned updates were never made"
            found.append(Counterexample(what, f"step {absent[0]}", _rows(plan[absent[0]]), "no update"))
    return conclude(CLAIM, checked, found, missing)


def _batch(event: StepEvent, plan: Mapping[int, Sequence[RowId]]) -> list[Counterexample]:
    where = f"step {event.number}"
    planned = plan.get(event.number)
    if planned is None:
        return [Counterexample("an update that was not planned", where, "no update", _rows(event.ids))]
    if tuple(planned) == event.ids:
        return []
    what = "the planned rows in another order" if Counter(planned) == Counter(event.ids) else "other rows than planned"
    elsewhere = next((number for number, rows in sorted(plan.items()) if tuple(rows) == event.ids), None)
    if elsewhere is not None:
        what = f"{what}: those of step {elsewhere}"
    return [Counterexample(what, where, _rows(planned), _rows(event.ids))]


def _rows(rows: Sequence[RowId]) -> str:
    shown = " ".join(map(str, rows[:_SHOWN]))
    return f"[{shown}{' ...' if len(rows) > _SHOWN else ''}]"
