"""Each update trains on the rows that an independently computed plan gives it, in that order."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from andon_falsify.history import History, RowId, StepEvent
from andon_falsify.verdict import Claim, Counterexample, Verdict, conclude, not_applicable

CLAIM = Claim(
    "plan-followed",
    1,
    "The global batch of every update is the planned one, a function of (seed, epoch, position) and of nothing else.",
)

_SHOWN = 12


class PublishedPlan(Mapping[int, Sequence[int]]):
    """The global batches of our trainer by its published rule: update from 1 -> rows in order.

    A shuffle of `rows` keyed by (seed, epoch), cut into batches; the last of an epoch has what is left. updates: of an
    epoch of packs, which are dealt out so that earlier updates have at most one more. Only the epoch of the last access
    is in memory.
    """

    def __init__(self, rows: Sequence[int], seed: int, batch_size: int, steps: int, updates: int | None = None) -> None:
        self._rows, self._seed = rows, seed
        sizes = [min(batch_size, len(rows) - at) for at in range(0, len(rows), batch_size)]
        if updates is not None:
            sizes = [len(range(first, len(rows), updates)) for first in range(updates)]
        self._ends = list(accumulate(sizes, initial=0))
        self._steps = steps if sizes else 0
        self._epoch, self._order = -1, array("q")

    def __getitem__(self, update: int) -> Sequence[int]:
        if not 1 <= update <= self._steps:
            raise KeyError(update)
        epoch, place = divmod(update - 1, len(self._ends) - 1)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, array("q", self._rows)
            random.Random(f"andon order {self._seed} {epoch}").shuffle(self._order)
        return self._order[self._ends[place] : self._ends[place + 1]].tolist()

    def __iter__(self) -> Iterator[int]:
        return iter(range(1, self._steps + 1))

    def __len__(self) -> int:
        return self._steps


def check(history: History, plan: Mapping[int, Sequence[RowId]] | None) -> Verdict:
    """Compare the rows of every update, repeated ones included, with `plan` (update from 1 -> rows in order).

    Not applicable without a plan. A history that was cut short is judged as far as it goes; one that ended must have
    made every planned update, and one that says that it stopped early every one up to its last.
    """
    if plan is None:
        return not_applicable(CLAIM, "no plan was given to compare with")
    found: list[Counterexample] = []
    checked, missing = 0, ""
    planned_at: dict[int, int] = {}
    for event in history.steps:
        if not event.ids:
            missing = missing or f"step {event.number} lists no rows"
            continue
        checked += 1
        planned = plan.get(event.number)
        if planned is not None and tuple(planned) == event.ids:
            continue
        if not planned_at:  # made once, since a plan computes the order of an epoch at each first access
            planned_at = {hash(tuple(rows)): number for number, rows in sorted(plan.items(), reverse=True)}
        found.append(_other(event, planned, planned_at.get(hash(event.ids))))
    if history.runs and history.runs[-1].finished:
        last = max(history.trajectory, default=0) if history.runs[-1].stopped_early else max(plan, default=0)
        absent = sorted(number for number in plan.keys() - history.trajectory.keys() if number <= last)
        if absent:
            what = f"{len(absent)} planned updates were never made"
            found.append(Counterexample(what, f"step {absent[0]}", _rows(plan[absent[0]]), "no update"))
    return conclude(CLAIM, checked, found, missing)


def _other(event: StepEvent, planned: Sequence[RowId] | None, elsewhere: int | None) -> Counterexample:
    where = f"step {event.number}"
    if planned is None:
        return Counterexample("an update that was not planned", where, "no update", _rows(event.ids))
    what = "the planned rows in another order" if Counter(planned) == Counter(event.ids) else "other rows than planned"
    if elsewhere is not None:
        what = f"{what}: those of step {elsewhere}"
    return Counterexample(what, where, _rows(planned), _rows(event.ids))


def _rows(rows: Sequence[RowId]) -> str:
    shown = " ".join(map(str, rows[:_SHOWN]))
    return f"[{shown}{' ...' if len(rows) > _SHOWN else ''}]"
