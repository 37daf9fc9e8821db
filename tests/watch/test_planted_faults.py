"""Every fault of the catalogue that a watch can see in a running loop is caught, by its clause and in time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from andon_contracts.watch import updates
from andon_falsify.ranks.pool import RankPool
from falsify.power.looped import FAULTS
from falsify.power.looped.fault import Inside
from falsify.power.planting import patched
from tests.support.ranks import run_ranks as run_ranks
from tests.watch.watched import Trace, Watched

WORLD = 2
DEADLINE_S = 200.0
Pair = tuple[Trace, Trace]
Found = list[tuple[str, int]]
SEEN = tuple((fault, fault.inside) for fault in FAULTS if isinstance(fault.inside, Inside))
"""The faults that a watch sees, with what it is to find."""
FIRST = {(inside.clause, inside.lines): number for number, (_, inside) in reversed(list(enumerate(SEEN)))}
"""The first fault of each clause and of the lines that the clause needs: those that every run of the tests plants."""
LATE = ("F13 moment of one rank astray", "F44 updates of a 16-bit head rounded away", "F89 bit flip in a weight")
"""Faults of what an update left, which every run of the tests has judged late."""

_right: dict[object, Trace] = {}


def both(numbers: Sequence[int]) -> list[Pair]:
    """The loops of these rows of the catalogue, without and with the fault, on this rank."""
    pairs = []
    for fault, inside in (SEEN[number] for number in numbers):
        # Without the fault nothing is poisoned, and no update is the one at which it acts; faults share such runs.
        clean = replace(inside, clause="", by=0, case=inside.case.but(poison=None), at=None)
        key = (fault.right, clean, updates._judged_late)
        if key not in _right:
            _right[key] = Watched(fault.right, clean).run()
        pairs.append((_right[key], Watched(fault.loop, inside).run()))
    return pairs


def alone(numbers: Sequence[int]) -> list[Found]:
    """What the one line finds of faults for which a watch can be told more."""
    return [Watched(SEEN[each][0].loop, replace(SEEN[each][1], lines=())).run().found for each in numbers]


def tried(asked: tuple[int, bool]) -> tuple[Pair, Found]:
    """The pair of one row on this rank, and what the one line finds if the row says so; late: judged as on a GPU."""
    number, late = asked
    with ExitStack() as stack:
        if late:
            patched(stack, updates, "_judged_late", lambda subject: True)
        (pair,) = both([number])
        found = alone([number])[0] if SEEN[number][1].alone else []
    return pair, found


def hold(number: int, pairs: Sequence[Pair], one_line: Sequence[Found], *, later: int = 0) -> None:
    """Check one row of the catalogue: the right loop raises nothing, the fault changes state, and every rank finds it
    by its clause, at most `later` updates after the catalogue's step; also with the one line, if the row says so."""
    fault, inside = SEEN[number]
    assert [right.found for right, _ in pairs] == [[]] * WORLD, f"{fault.name}: an alarm without the fault"
    # Of a fault that is found later (on a GPU), the CPU's run shows that it changes the state.
    assert later or any(right.states != wrong.states for right, wrong in pairs), f"{fault.name} changes nothing"
    for found, clause, by in (
        ([wrong.found for _, wrong in pairs], inside.clause, inside.by),
        (one_line, inside.alone, max(inside.by, inside.alone_by)),
    ):
        if clause:
            assert found[0] == found[1], fault.name
            steps = [step for name, step in found[0] if name == clause]
            assert steps, f"{fault.name}: found only {found[0]}"
            assert min(steps) <= by + later, fault.name


class Pairs(Sequence[list[Pair]]):
    """By fault, then by rank: what a run without it left and found, and one with it."""

    def __init__(self) -> None:
        self.pool = RankPool(WORLD, DEADLINE_S)
        self.run("builtins:repr", "")  # the ranks are there before a test looks which processes there are

    def __len__(self) -> int:
        return len(SEEN)

    def __getitem__(self, number: Any) -> Any:
        if not 0 <= number < len(SEEN):
            raise IndexError(number)
        return [pair for ((pair,),) in zip(self.run(f"{__name__}:both", [number]), strict=True)]

    def run(self, work: str, argument: object) -> list[Any]:
        answers = self.pool.run(work, argument)
        assert [answer.error for answer in answers if answer.error] == []
        return [answer.value for answer in answers]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Pairs]:
    """Two ranks that stay for all faults: what costs most is the first model of a process."""
    held = Pairs()
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
def test_a_fault_is_found_by_its_clause_and_its_right_loop_is_silent(ranks: Pairs, number: int) -> None:
    """One pair of runs, told the same lines; see `hold`."""
    pairs, one_line = zip(*ranks.run(f"{__name__}:tried", (number, False)), strict=True)
    hold(number, pairs, one_line)


@pytest.mark.parametrize(
    "number", _rows(sorted({*FIRST.values(), *map(NAMES.index, LATE)}), [NAMES.index(name) for name in LATE])
)
def test_a_fault_that_is_judged_late_is_found_by_the_same_step(ranks: Pairs, number: int) -> None:
    """As with a GPU, where an update is judged before the next one; and the right loop is silent there too."""
    pairs, one_line = zip(*ranks.run(f"{__name__}:tried", (number, True)), strict=True)
    hold(number, pairs, one_line)


def test_the_frozen_table_has_every_fault_with_its_clause() -> None:
    """`tests/golden/watch.json` has a row for each fault, and says why a watch does not see the others."""
    rows = json.loads((Path(__file__).parents[1] / "golden" / "watch.json").read_text(encoding="utf-8"))
    found = [(row["fault"], row["clause"], row["by"]) for row in rows if "clause" in row]
    assert sorted(found) == sorted((fault.name, inside.clause, inside.by) for fault, inside in SEEN)
    unseen = {row["fault"] for row in rows if "not seen" in row}
    assert unseen == {fault.name for fault in FAULTS if not isinstance(fault.inside, Inside)}
