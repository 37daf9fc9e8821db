"""Every planned row is used exactly once: by one rank in its batch, and once an epoch."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import ceil

from andon_falsify.history import History, RowId, RowSet, StepEvent
from andon_falsify.verdict import Claim, Counterexample, Verdict, conclude, first_of_many, not_applicable

CLAIM = Claim(
    "samples-once",
    1,
    "The ranks' rows of a batch are disjoint and together the batch; an epoch visits every training row exactly once; "
    "two epochs visit them in different orders.",
    "seed F-DP-002, C-DP-002; accelerate even_batches",
)

_SHOWN = 8
_ORDERED = 8
"""Fewer rows may come in the same order twice by chance."""


def check(history: History) -> Verdict:
    """Check every update's split, then every epoch of the trajectory (an update done again counts once).

    The training rows are those of the start line, and where it lists none its number of rows is held to.
    An epoch is judged complete when a later one began, or the plan was done and left room for all of its batches; an
    incomplete one may not repeat a row.
    Orders are compared between complete epochs of at least 8 rows. Unknown where ranks or batches list no rows, or no
    epoch was complete.
    """
    found: list[Counterexample] = []
    checked, missing = 0, ""
    for event in history.steps:
        if not event.ids or not event.ranks:
            missing = missing or f"step {event.number} lists no rows"
            continue
        checked += 1
        found += _split(event)
    rows = history.plan.ids
    size = len(rows) if rows is not None else history.plan.rows
    epochs = _epochs(history)
    complete = _complete(history, epochs)
    repeats: list[Counterexample] = []
    first_with: dict[bytes, int] = {}  # by the digest of its order, since all orders may take gigabytes
    for epoch, updates in epochs.items():
        whole, seen, order, once = epoch in complete, RowSet(), hashlib.sha256(), True
        for event in updates:
            visits = _visited(event)
            once = seen.add(visits) and once
            order.update(repr([*visits])[1:-1].encode() + b", ")
        all_seen = size in (None, len(seen)) if rows is None else seen == RowSet(rows)
        if not once or (whole and not all_seen):
            found += _visits(epoch, updates, rows if whole else None, size if whole else None)
        if whole and len(seen) >= _ORDERED:
            before = first_with.setdefault(order.digest(), epoch)
            if before != epoch:
                what = f"the rows came in the order of epoch {before}"
                repeats.append(Counterexample(what, f"epoch {epoch}", "another order", "the same order"))
    found += repeats
    if not complete:
        missing = missing or _why_none(history)
    elif size is None:
        missing = missing or "neither the training rows nor their number are known"
    return conclude(CLAIM, checked, found, missing)


def check_visits(history: History) -> Verdict:
    """The same of a history that tells which rows its ranks had, and not what was planned, as a script's.

    Of R rows that are ever visited, every R visits in a row visit each once: epochs, whatever their borders. Where it
    tells none, what its watch saw itself at the data loaders falsifies; that it saw nothing wrong proves nothing.
    """
    visits = [row for step in history.trajectory.values() for row in step.ids]
    if not visits:
        seen = [event.fields for event in history.of_kind("violation") if event.fields.get("clause") == CLAIM.name]
        broken = [fields for fields in seen if fields.get("action") != "suspected"]
        if broken:
            what, step = broken[0].get("seen"), broken[0].get("step")
            return conclude(CLAIM, len(broken), [Counterexample(f"{what}", f"step {step}, at its data loader")])
        return not_applicable(CLAIM, "the script tells no rows (w.batch)")
    rows, found, checked = set(visits), list[Counterexample](), 0
    for epoch, start in enumerate(range(0, len(visits), len(rows))):
        own = visits[start : start + len(rows)]
        checked += 1
        if twice := repeated(own):
            lost = rows - set(own)
            what = f"in visits {start + 1} to {start + len(own)} of {len(rows)} rows some came more than once"
            never = f"never {listed(Counter(lost))}, " if lost and len(own) == len(rows) else ""
            found.append(Counterexample(what, f"epoch {epoch}", "each once", f"{never}more than once {listed(twice)}"))
            break
    return conclude(CLAIM, checked, found)


def _why_none(history: History) -> str:
    """Why no epoch was complete, where a watch could not tell where one ends."""
    untold = all(event.epoch is None for event in history.steps)
    if history.start is not None and history.start.watched and untold:
        return "the watch records no epochs without rows= and plan=, so no epoch is known to be complete"
    return "no epoch was complete"


def _split(event: StepEvent) -> list[Counterexample]:
    """Rows of the ranks against rows of the batch, as multisets; the count against the rows."""
    where = f"step {event.number}"
    found = []
    if event.count is not None and event.count != len(event.ids):
        found.append(Counterexample("the count is not that of the batch", where, str(len(event.ids)), str(event.count)))
    visits = [row for entry in event.ranks for row in entry.ids]
    if set(visits) == set(event.ids) and len(set(visits)) == len(visits) == len(event.ids):
        return found  # as almost every update of a long history is
    used, planned = Counter(visits), Counter(event.ids)
    twice = repeated(used.elements())
    if twice:
        holders = ", ".join(str(entry.rank) for entry in event.ranks if not twice.keys().isdisjoint(entry.ids))
        found.append(Counterexample(f"rows used more than once, by ranks {holders}", where, "each once", _named(twice)))
    if planned - used:
        found.append(Counterexample("rows of the batch that no rank used", where, _named(planned - used), ""))
    strangers = Counter({row: times for row, times in used.items() if row not in planned})
    if strangers:
        found.append(Counterexample("rows that are not in the batch", where, "", _named(strangers)))
    return found


def _epochs(history: History) -> dict[int, list[StepEvent]]:
    updates: dict[int, list[StepEvent]] = {}
    for event in history.trajectory.values():
        if event.epoch is not None:
            updates.setdefault(event.epoch, []).append(event)
    return updates


def _visited(event: StepEvent) -> Sequence[RowId]:
    """The rows of an update as the ranks used them, but in the batch's order if it has the same rows."""
    used = [row for entry in event.ranks for row in entry.ids]
    return event.ids if not used or used == [*event.ids] or Counter(used) == Counter(event.ids) else used


def _complete(history: History, epochs: Mapping[int, Sequence[StepEvent]]) -> tuple[int, ...]:
    """The epochs of which every update is in the trajectory; a limit on updates may end the last one early."""
    numbers = list(history.trajectory)
    gaps = numbers != list(range(1, len(numbers) + 1))
    if gaps or not epochs or any(event.epoch is None for event in history.trajectory.values()):
        return ()
    plan = history.plan
    finished = history.runs[-1].finished if plan.steps is None else len(numbers) >= plan.steps
    if plan.rows and plan.batch_size:
        last = sum(event.epoch == list(epochs)[-1] for event in history.trajectory.values())
        finished = finished and last >= ceil(plan.rows / plan.batch_size)
    return tuple(epochs if finished else list(epochs)[:-1])


def _visits(
    epoch: int, updates: Sequence[StepEvent], rows: Sequence[RowId] | None, size: int | None
) -> list[Counterexample]:
    """Repeated rows, and in a complete epoch those missing and those that are no training rows.

    It counts all visits in one table, which takes gigabytes for an epoch of millions of rows.
    """
    visits = [row for event in updates for row in _visited(event)]
    where = f"epoch {epoch}"
    times = Counter(visits)
    found = []
    twice = repeated(visits)
    if twice:
        what = f"{len(visits)} visits of {len(times)} rows: some were visited more than once"
        found.append(Counterexample(what, where, "each once", _named(twice)))
    if rows is not None:
        if lost := set(rows) - times.keys():
            found.append(Counterexample("rows that were never visited", where, _named(Counter(lost)), ""))
        if strange := times.keys() - set(rows):
            found.append(Counterexample("rows that are not for training", where, "", _named(Counter(strange))))
    elif size is not None and len(times) != size:
        found.append(Counterexample("another number of rows was visited", where, str(size), str(len(times))))
    return found


def repeated(visits: Iterable[RowId]) -> Counter[RowId]:
    """The rows that are there more than once, as often as they are."""
    return Counter({row: times for row, times in Counter(visits).items() if times > 1})


def listed(rows: Counter[RowId]) -> str:
    """`3, 5 (3 times) and 12 more`."""
    order = sorted(rows, key=lambda row: (isinstance(row, str), row if isinstance(row, int) else 0, str(row)))
    return first_of_many([f"{row}" + (f" ({rows[row]} times)" if rows[row] > 1 else "") for row in order], _SHOWN)


def _named(rows: Counter[RowId]) -> str:
    return f"rows {listed(rows)}"
