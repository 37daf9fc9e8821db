"""One result for every world size and every backend: the same digests and the same loss at every update, to the bit."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from andon_falsify.checkers.equal_updates import GIVEN, bits
from andon_falsify.history import History, StepEvent
from andon_falsify.verdict import Claim, Counterexample, Verdict, conclude, not_applicable, unknown

CLAIM = Claim(
    "same-everywhere",
    1,
    "The same run on another number of workers or another backend gives the same rows, loss, gradient, weights and "
    "optimizer state at every update, to the bit.",
)


def check(histories: Sequence[History]) -> Verdict:
    """Compare every history with the first, update by update, and name the first update that differs.

    Not applicable where fingerprints differ: bits of another machine are not comparable, never wrong. Unknown for
    fewer than two histories, for several of the same world and backend only, and where no update is in both.
    """
    if len(histories) < 2:
        return unknown(CLAIM, f"{len(histories)} histories, at least two are needed")
    first, *others = histories
    for other in others:
        if _fingerprint(other) != _fingerprint(first):
            return not_applicable(CLAIM, f"not comparable: {other.name} has another fingerprint than {first.name}")
    found: list[Counterexample] = []
    checked, missing = 0, ""
    if len({_place(history) for history in histories}) < 2:
        missing = f"every history ran on {_place(first)}"
    for other in others:
        compared, differences = _compare(first, other)
        checked += compared
        found += differences
        if not compared:
            missing = missing or f"{other.name} and {first.name} record nothing that can be compared"
    return conclude(CLAIM, checked, found, missing)


def _compare(first: History, other: History) -> tuple[int, list[Counterexample]]:
    """Comparisons made, and the first difference (one is enough: what follows from it differs as well)."""
    start = _initial(first, other)
    if start:
        return 1, start
    checked = 0
    for number, event in first.trajectory.items():
        if number not in other.trajectory:
            continue
        compared, found = _step(event, other.trajectory[number], first.name, other.name)
        checked += compared
        if found:
            return checked, [found]
    return checked, _lengths(first, other)


def _step(event: StepEvent, twin: StepEvent, name: str, other: str) -> tuple[int, Counterexample | None]:
    """Results compared, and the first difference. What was fed in is no result: it alone proves nothing."""
    where = f"step {event.number}, {other} ({_of(twin)}) against {name} ({_of(event)})"
    if event.ids and twin.ids and event.ids != twin.ids:
        pairs_of_rows = enumerate(zip_longest(event.ids, twin.ids))
        index, rows = next((index, pair) for index, pair in pairs_of_rows if pair[0] != pair[1])
        what = f"the rows differ first, at place {index} of the batch"
        return 1, Counterexample(what, where, str(rows[0]), str(rows[1]))
    held, other_held = bits(event), bits(twin)
    both = {field: (held[field], other_held[field]) for field in held if field in other_held and field != "rows"}
    checked = len(both.keys() - GIVEN)
    differing = [field for field, pair in both.items() if pair[0] != pair[1]]
    if not differing:
        return checked, None
    equal = [field for field in both if field not in differing]
    what = f"the {differing[0]} differs first" + (f" ({', '.join(equal)} agree)" if equal else "")
    return checked, Counterexample(what, where, *both[differing[0]])


def _initial(first: History, other: History) -> list[Counterexample]:
    held = [history.start.initial_weights if history.start else None for history in (first, other)]
    if None in held or held[0] == held[1]:
        return []
    where = f"before step 1, {other.name} against {first.name}"
    return [Counterexample("the initial weights differ", where, str(held[0]), str(held[1]))]


def _lengths(first: History, other: History) -> list[Counterexample]:
    """Two histories that both ended must have made the same updates."""
    ended = all(history.runs and history.runs[-1].finished for history in (first, other))
    if not ended or first.trajectory.keys() == other.trajectory.keys():
        return []
    expected, seen = (f"{len(history.trajectory)} updates" for history in (first, other))
    return [Counterexample("another number of updates", f"{other.name} against {first.name}", expected, seen)]


def _fingerprint(history: History) -> object:
    return history.start.fingerprint if history.start is not None else None


def _place(history: History) -> str:
    return " then ".join(dict.fromkeys(_of(event) for event in history.steps))


def _of(event: StepEvent) -> str:
    return f"world {event.world} {event.backend}"
