"""Every fault of the catalogue that a watch can see in a running loop is caught, by its clause and in time."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from andon_contracts.watch import updates
from andon_falsify.ranks.pool import RankPool
from falsify.power.looped import FAULTS
from falsify.power.looped.fault import Inside, LoopFault
from falsify.power.planting import patched
from tests.watch.watched import Trace, Watched

WORLD = 2
DEADLINE_S = 200.0
Pair = tuple[Trace, Trace]
SEEN = tuple((fault, fault.inside) for fault in FAULTS if isinstance(fault.inside, Inside))
"""The faults that a watch sees, with what it is to find."""
FIRST = {(inside.clause, inside.lines): number for number, (_, inside) in reversed(list(enumerate(SEEN)))}
"""The first fault of each clause and of the lines that the clause needs: those that every run of the tests plants."""
LATE = ("F13 moment of one rank astray", "F44 updates of a 16-bit head rounded away", "F89 bit flip in a weight")
"""Faults of what an update left, which every run of the tests has judged late."""

_right: dict[object, Trace] = {}


def _pair(fault: LoopFault, inside: Inside) -> Pair:
    # Without the fault nothing is poisoned, and no update is the one at which it acts; faults share such runs.
    clean = replace(inside, clause="", by=0, alone="", says="", case=inside.case.but(poison=None), at=None)
    key = (fault.right, clean, updates._judged_late)
    if key not in _right:
        _right[key] = Watched(fault.right, clean).run()
    return _right[key], Watched(fault.loop, inside).run()


def pairs_of(number: int) -> tuple[Pair, Pair | None]:
    """The loops of this row without and with the fault, on this rank; and by the one line alone if it sees the fault
    and can be told more."""
    fault, inside = SEEN[number]
    bare = replace(inside, lines=(), resumed=inside.resumed if inside.continued is None else None)
    told = replace(inside, continued=None) if inside.lines else inside
    return _pair(fault, told), _pair(fault, bare) if inside.alone or inside.says else None


def said_by(inside: Inside, trace: Trace) -> str:
    """What the watch said of the fault in the log; "" if nothing."""
    match = re.search(inside.says, trace.said) if inside.says else None
    return match[0] if match else ""


def tried(asked: tuple[int, bool]) -> tuple[Pair, Pair | None]:
    """See `pairs_of`; late: judged as on a GPU."""
    number, late = asked
    with ExitStack() as stack:
        if late:
            patched(stack, updates, "_judged_late", lambda subject: True)
        return pairs_of(number)


def hold(number: int, pairs: Sequence[Pair], one_line: Sequence[Pair | None], *, later: int = 0) -> None:
    """Check one row of the catalogue: the right loop raises nothing, the fault changes state, and every rank finds it
    by its clause, at most `later` updates after the catalogue's step; also with the one line, if the row says so."""
    bare = [each for each in one_line if each is not None]
    fault, inside = SEEN[number]
    right_ones = [right.found for right, _ in (*pairs, *bare)]
    assert right_ones == [[]] * len(right_ones), f"{fault.name}: an alarm without the fault"
    # Of a fault that is found later (on a GPU), the CPU's run shows that it changes the state.
    assert later or any(right.states != wrong.states for right, wrong in pairs), f"{fault.name} changes nothing"
    for found, clause, by in (
        ([wrong.found for _, wrong in pairs], inside.clause, inside.by),
        ([wrong.found for _, wrong in bare], inside.alone, max(inside.by, inside.alone_by)),
    ):
        if clause:
            assert found[0] == found[1], fault.name
            steps = [step for name, step in found[0] if name == clause]
            assert steps, f"{fault.name}: found only {found[0]}"
            assert min(steps) <= by + later, fault.name
    if inside.says:  # rank 0 prints the lines
        assert [bool(said_by(inside, trace)) for trace in bare[0]] == [False, True], f"{fault.name}: {bare[0]}"


class Ranks:
    """Two ranks that stay for all faults: what costs most is the first model of a process."""

    def __init__(self) -> None:
        self.pool = RankPool(WORLD, DEADLINE_S)
        self.pool.run("builtins:repr", "")  # the ranks are there before a test looks which processes there are

    def tried(self, number: int, *, late: bool = False) -> list[tuple[Pair, Pair | None]]:
        """By rank, what a run without the fault of this row left and found, and one with it. See `tried`."""
        answers = self.pool.run(f"{__name__}:tried", (number, late))
        assert [answer.error for answer in answers if answer.error] == []
        return [answer.value for answer in answers]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    held = Ranks()
    yield held
    held.pool.close()


pytestmark = pytest.mark.xdist_group("test_planted_faults")
NAMES = [fault.name for fault, _ in SEEN]


def _rows(chosen: Sequence[int], default: Sequence[int]) -> list[Any]:
    # Deep: the default run plants the first fault of the same clause and lines.
    return [
        pytest.param(number, id=NAMES[number], marks=() if number in default else pytest.mark.deep) for number in chosen
    ]


@pytest.mark.parametrize("number", _rows(range(len(SEEN)), list(FIRST.values())))
def test_a_fault_is_found_by_its_clause_and_its_right_loop_is_silent(ranks: Ranks, number: int) -> None:
    """One pair of runs, told the same lines; see `hold`."""
    pairs, one_line = zip(*ranks.tried(number), strict=True)
    hold(number, pairs, one_line)


@pytest.mark.parametrize(
    "number", _rows(sorted({*FIRST.values(), *map(NAMES.index, LATE)}), [NAMES.index(name) for name in LATE])
)
def test_a_fault_that_is_judged_late_is_found_by_the_same_step(ranks: Ranks, number: int) -> None:
    """As with a GPU, where an update is judged before the next one; and the right loop is silent there too."""
    pairs, one_line = zip(*ranks.tried(number, late=True), strict=True)
    hold(number, pairs, one_line)


def test_the_frozen_table_has_every_fault_with_its_clause() -> None:
    """`tests/golden/watch.json` has a row for each fault, and says why a watch does not see the others."""
    rows = json.loads((Path(__file__).parents[1] / "golden" / "watch.json").read_text(encoding="utf-8"))
    found = [(row["fault"], row["clause"], row["by"]) for row in rows if "clause" in row]
    assert sorted(found) == sorted((fault.name, inside.clause, inside.by) for fault, inside in SEEN)
    unseen = {row["fault"] for row in rows if "not seen" in row}
    assert unseen == {fault.name for fault in FAULTS if not isinstance(fault.inside, Inside)}
    kinds, alone = {fault.code for fault in FAULTS}, {f.code for f, i in SEEN if not i.lines or i.alone or i.says}
    figures = (Path(__file__).parents[2] / "docs" / "figures.md").read_text(encoding="utf-8")
    assert f"{len(alone)} of {len(kinds)} kinds" in figures
