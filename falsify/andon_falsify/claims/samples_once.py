"""Every planned row is used exactly once: by one rank in its batch, and once in an epoch."""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import ceil, comb
from typing import TYPE_CHECKING

from andon_falsify.claims.evidence import Evidence
from andon_falsify.history import History, RowId, RowSet, StepEvent
from andon_falsify.verdict import Claim, Clause, Counterexample, Verdict, conclude, first_of_many, merge, not_applicable

if TYPE_CHECKING:
    from andon_falsify.claims.laws import LoopLaw

CLAIM = Claim(
    "samples-once",
    1,
    "The ranks share each batch without overlap or gap. An epoch visits every training row exactly once. Two epochs "
    "have different orders.",
    order=20,
    subjects=("trainer", "loop", "script", "ledger"),
    clauses=(
        Clause("samples-once", "same"),
        Clause("content-planned"),
        Clause("updates-planned"),
        Clause("order-renewed"),
    ),
)
_TWICE, _LOST, _STRANGE = "rows are used more than once", "rows are not used", "rows do not belong there"
"""Causes, which a smaller counterexample must keep."""
_RENEW = "call sampler.set_epoch(epoch), or seed your sampler by the epoch"
_ORDERED, _CHANCE = 8, 10**6
"""Fewer rows, or batches that could be drawn in fewer ways, may come in the same order twice by chance."""
_WORD = (1 << 64) - 1


def check(evidence: Evidence) -> Verdict:
    """The rows that ranks were observed to train on, or those that the ledger lists."""
    history = evidence.history
    if evidence.of_loop:
        return _of_loop(evidence.loop_law)
    if evidence.of_script:
        return check_visits(history)
    if history.start is not None and history.start.watched and not any(step.ids for step in history.steps):
        return not_applicable(CLAIM, "the loop does not report its rows (w.batch)")
    return check_history(history)


def _rows(what: str, where: str, expected: str, seen: str, cause: str = "") -> Counterexample:
    return Counterexample(what, where, expected, seen, quantity="rows", cause=cause)


def _of_loop(law: LoopLaw) -> Verdict:
    made, parts = sorted(law.first.made), law.parts
    if made and all(set(part.rowless) >= set(made) for part in parts):
        return not_applicable(CLAIM, "the model gets no `input_ids`, and the loop reports no rows (told.rows)")
    found: list[Counterexample] = []
    if strangers := [stranger for part in parts for stranger in part.strangers]:
        first = min(strangers, key=lambda stranger: (stranger.step, stranger.rank))
        where, shown = f"step {first.step}, rank {first.rank}", "; ".join(each.text for each in strangers[:3])
        found.append(_rows(f"{len(strangers)} rows are not in the dataset", where, "unchanged rows of the case", shown))
    left = sorted(row for part in parts for row in part.leftover)
    if left and law.first.violation is None:
        shown = f"rows {', '.join(map(str, left))}"
        found.append(_rows("forward passes after the last update", "the end of the run", "none", shown))
    missing = f"the rows of update {min(law.unknown_updates)} are not all known" if law.unknown_updates else ""
    size, sizes = law.case.global_batch, list[Counterexample]()
    for step in made:
        if (count := law.visited(step)) > size:
            sizes.append(_rows("more rows than the global batch has", f"step {step}", str(size), str(count)))
    planned, updates = law.case.updates(size), len(made) + law.first.resumed_from
    stopped = law.first.violation is not None or law.case.stop_after is not None
    if updates > planned or (updates < planned and not stopped):
        sizes.append(_rows("a different number of updates than planned", "", str(planned), str(updates)))
    known, counted = conclude(CLAIM, len(made), found, missing), conclude(CLAIM, len(made), sizes)
    verdict = merge([known, check_history(law.trace.seen), counted])
    if not (weightless := sorted({row for part in parts for row in part.weightless})):
        return verdict
    shown = first_of_many(weightless, 3)
    note = f"forward passes of rows {shown} did not contribute to a gradient and are not counted"
    return replace(verdict, reasons=(*verdict.reasons, note))


def check_history(history: History) -> Verdict:
    """Check every update's split, then every epoch of the trajectory (an update made again after a resume counts once).

    The training rows are those of the start line; if it lists none, only their number is compared. An epoch is complete
    if a later one began, or the plan was finished and had room for all its batches; an incomplete one may not repeat a
    row. Orders are compared between complete epochs of at least 8 rows.
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
    epochs: dict[int, list[StepEvent]] = {}
    for event in history.trajectory.values():
        if event.epoch is not None:
            epochs.setdefault(event.epoch, []).append(event)
    complete = _complete(history, epochs)
    repeats: list[Counterexample] = []
    first_with: dict[bytes, int] = {}  # by the digest of an epoch's order: all orders may take gigabytes
    for epoch, updates in epochs.items():
        whole, seen, order, once = epoch in complete, RowSet(), hashlib.sha256(), True
        for event in updates:
            visits = _visits(event)
            once = seen.add(visits) and once
            order.update(repr([*visits])[1:-1].encode() + b", ")
        all_seen = size in (None, len(seen)) if rows is None else seen == RowSet(rows)
        if not once or (whole and not all_seen):
            found += _epoch(epoch, updates, rows if whole else None, size if whole else None)
        if whole and len(seen) >= _ORDERED:
            before = first_with.setdefault(order.digest(), epoch)
            if before != epoch:
                what = f"the rows have the order of epoch {before}"
                repeats.append(_rows(what, f"epoch {epoch}", "another order", "the same order"))
    found += repeats
    if not complete:
        watched = history.start is not None and history.start.watched
        watched = watched and all(event.epoch is None for event in history.steps)
        untold = "the watch records no epochs without rows= and plan=, so no epoch is known to be complete"
        missing = missing or (untold if watched else "no epoch was complete")
    elif size is None:
        missing = missing or "neither the training rows nor their number are known"
    return conclude(CLAIM, checked, found, missing)


def check_visits(history: History) -> Verdict:
    """The same for the ledger of a script, which has the rows of its ranks but not the plan.

    Of R different rows, every R consecutive visits must visit each once: these are the epochs. With `drop_last` an
    epoch is shorter: all updates are equally large, and it leaves out fewer rows than one has. Two epochs may have one
    order only if each rank reads its rows in rising order: then the script does not shuffle. A violation that the watch
    saw at the data loader falsifies: of the order, or of any kind if the script does not report its rows.
    """
    steps = [*history.trajectory.values()]
    visits = [row for step in steps for row in step.ids]
    clauses = ("order-renewed",) if visits else ("order-renewed", CLAIM.name)
    found = [each.fields for each in history.of_kind("violation") if each.fields.get("clause") in clauses]
    if broken := [fields for fields in found if fields.get("action") != "suspected"]:
        seen, where = broken[0].get("seen"), f"step {broken[0].get('step')}, at its data loader"
        remedy = f": {_RENEW}" if broken[0].get("clause") == "order-renewed" else ""
        return conclude(CLAIM, len(broken), [_rows(f"{seen}{remedy}", where, "", "")])
    if not visits:
        return _check_drawn(steps)
    rows, sizes = set(visits), {len(step.ids) for step in steps}

    def cut(length: int) -> list[list[RowId]]:
        return [visits[start : start + length] for start in range(0, len(visits), length)]

    shorter = len(rows) - len(rows) % min(sizes) if len(sizes) == 1 else 0
    dropped = shorter and any(map(_repeated, cut(len(rows)))) and not any(map(_repeated, cut(shorter)))
    epochs = cut(length := shorter if dropped else len(rows))
    for epoch, own in enumerate(epochs):
        if twice := _repeated(own):
            start = epoch * len(rows)
            lost = rows - set(own)
            what = f"in visits {start + 1} to {start + len(own)} of {len(rows)} rows some came more than once"
            never = f"never {listed(Counter(lost))}, " if lost and len(own) == len(rows) else ""
            if never and not _repeated(own[: -len(lost)]):  # those of an epoch that is too short, and of the next one
                what += ": some were left out and the next epoch began, or the last ones are repeated"
            shown = ("each once", f"{never}more than once {listed(twice)}")
            return conclude(CLAIM, epoch + 1, [_rows(what, f"epoch {epoch}", *shown, _TWICE)])
    whole = [own for own in epochs if len(own) == length >= _ORDERED]
    again = next((epoch for epoch, pair in enumerate(pairwise(whole), start=1) if pair[0] == pair[1]), 0)
    holders = [part.rank for step in steps for part in step.ranks for _ in part.ids] or [0] * len(visits)
    by_rank = sorted(zip(holders, whole[0], strict=False), key=lambda visit: visit[0]) if again else []
    rising = by_rank == sorted(by_rank, key=lambda visit: (visit[0], f"{visit[1]:0>20}"))
    return _of_orders(len(epochs), again, rising=rising, compared=len(whole) > 1)


def _of_orders(checked: int, again: int, note: str = "", *, rising: bool, compared: bool) -> Verdict:
    """The verdict on epochs that visit each row once. again: the first epoch with the order of the one before, or 0."""
    if again and not rising:
        what, seen = f"the rows have the order of epoch {again - 1}", f"the same, although they are shuffled: {_RENEW}"
        return conclude(CLAIM, checked, [_rows(what, f"epoch {again}", "another order", seen)])
    orders = f"two epochs have the same rising order: if they should be shuffled, {_RENEW}" if again else ""
    once = f"orders of epochs were not compared: no two whole epochs of {_ORDERED} rows or more are known in order"
    return conclude(CLAIM, checked, [], note="; ".join(filter(None, (note, orders if compared else once))))


def _check_drawn(steps: Sequence[StepEvent]) -> Verdict:
    """The indices that a torch DataLoader drew: the watch writes the sum of their mixed values for each update.

    A pass is whole if its sum is that of the indices from 0, each once; one with padding, or over a part of the data
    set, cannot be told from a wrong one. Passes have one order if updates at the same place have the same sum.
    """
    passes, reached, size = list[dict[int, int]](), 0, 0
    for step in steps:
        now, rows = int(step.state.get("in pass", 0)), step.state.get("rows")
        if now and rows:
            passes += [] if passes and now > reached else [{}]
            passes[-1][now], reached = int(rows, 16), now
            size = min(size or sys.maxsize, int(step.state["of"]))
    full = sum(map(_mixed, range(size))) & _WORD if any(size in own for own in passes) else -1
    whole = [own for own in passes if size in own and sum(own.values()) & _WORD == full]
    if not whole:
        why = "no pass of its data loader is known to have every row once" if passes else "it has no torch DataLoader"
        return not_applicable(CLAIM, f"the script does not report its rows (w.batch), and {why}")
    later = [n for n, own in enumerate(passes) if n and own in whole and comb(size, size // len(own)) > _CHANCE]
    again = next((number for number in later if passes[number - 1].items() <= passes[number].items()), 0)
    rising = False
    for shards in (1, steps[0].world or 1):  # the ranks read the data set in turn, or each its own part
        shares = [range(part * size // shards, (part + 1) * size // shards) for part in range(shards)]
        ends = pairwise((0, *whole[0]))
        sums = [sum(_mixed(row) for own in shares for row in own[a // shards : b // shards]) for a, b in ends]
        rising = rising or [each & _WORD for each in sums] == [*whole[0].values()]
    return _of_orders(len(whole), again, "rows as its data loader drew them", rising=rising, compared=bool(later))


def _mixed(word: int) -> int:
    """The finalizer of splitmix64, which the watch sums over indices."""
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    word = (word ^ word >> 27) * 0x94D049BB133111EB & _WORD
    return word ^ word >> 31


def _split(event: StepEvent) -> list[Counterexample]:
    where, found = f"step {event.number}", []
    if event.count is not None and event.count != len(event.ids):
        found.append(_rows("the count is not that of the batch", where, str(len(event.ids)), str(event.count)))
    visits = [row for entry in event.ranks for row in entry.ids]
    if set(visits) == set(event.ids) and len(set(visits)) == len(visits) == len(event.ids):
        return found  # almost every update of a long history leaves here
    used, planned = Counter(visits), Counter(event.ids)
    if twice := _repeated(visits):
        holders = ", ".join(str(entry.rank) for entry in event.ranks if not twice.keys().isdisjoint(entry.ids))
        found.append(_rows(f"rows used more than once, by ranks {holders}", where, "each once", _named(twice), _TWICE))
    if lost := planned - used:
        found.append(_rows("rows of the batch that no rank used", where, _named(lost), "", _LOST))
    if strange := Counter({row: times for row, times in used.items() if row not in planned}):
        found.append(_rows("rows that are not in the batch", where, "", _named(strange), _STRANGE))
    return found


def _visits(event: StepEvent) -> Sequence[RowId]:
    """The rows of an update as the ranks used them, but in the batch's order if it has the same rows."""
    used = [row for entry in event.ranks for row in entry.ids]
    return event.ids if not used or used == [*event.ids] or Counter(used) == Counter(event.ids) else used


def _complete(history: History, epochs: Mapping[int, Sequence[StepEvent]]) -> tuple[int, ...]:
    """The epochs whose updates are all in the trajectory. A limit on updates may end the last one early."""
    numbers, plan = list(history.trajectory), history.plan
    gaps = numbers != list(range(1, len(numbers) + 1))
    if gaps or not epochs or any(event.epoch is None for event in history.trajectory.values()):
        return ()
    finished = history.runs[-1].finished if plan.steps is None else len(numbers) >= plan.steps
    if plan.rows and plan.batch_size:
        finished = finished and len(epochs[list(epochs)[-1]]) >= ceil(plan.rows / plan.batch_size)
    return tuple(epochs if finished else list(epochs)[:-1])


def _epoch(
    epoch: int, updates: Iterable[StepEvent], rows: Sequence[RowId] | None, size: int | None
) -> list[Counterexample]:
    """Repeated rows; in a complete epoch also missing rows, and rows outside the training set.

    One table of all visits takes gigabytes for an epoch of millions of rows.
    """
    visits = [row for event in updates for row in _visits(event)]
    where, times, found = f"epoch {epoch}", Counter(visits), []
    if twice := _repeated(visits):
        what = f"{len(visits)} visits of {len(times)} rows: some were visited more than once"
        found.append(_rows(what, where, "each once", _named(twice), _TWICE))
    if rows is not None:
        if lost := set(rows) - times.keys():
            found.append(_rows("rows that were never visited", where, _named(lost), "", _LOST))
        if strange := times.keys() - set(rows):
            found.append(_rows("rows outside the training set", where, "", _named(strange), _STRANGE))
    elif size is not None and len(times) != size:
        found.append(_rows("a different number of rows was visited", where, str(size), str(len(times))))
    return found


def _repeated(visits: Iterable[RowId]) -> Counter[RowId]:
    return Counter({row: times for row, times in Counter(visits).items() if times > 1})


def listed(rows: Counter[RowId]) -> str:
    """`3, 5 (3 times) and 12 more`."""
    order = sorted(rows, key=lambda row: (isinstance(row, str), row if isinstance(row, int) else 0, str(row)))
    return first_of_many([f"{row}" + (f" ({rows[row]} times)" if rows[row] > 1 else "") for row in order], 8)


def _named(rows: Iterable[RowId]) -> str:
    return f"rows {listed(Counter(rows))}"
