"""Every fault of the catalogue that a watch can see in a running loop is caught, by its clause and in time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from andon_falsify.faults.looped import FAULTS
from andon_falsify.faults.looped.fault import Inside, LoopFault
from tests.support.ranks import run_ranks
from tests.watch.watched import Trace, Watched

WORLD = 2
CHUNK = 8
DEADLINE_S = 200.0
Pair = tuple[Trace, Trace]
SEEN = tuple((fault, fault.inside) for fault in FAULTS if isinstance(fault.inside, Inside))
"""The faults that a watch sees, with what it is to find."""


def both(first: int) -> list[Pair]:
    """The loops of one part of the catalogue, without and with the fault, on this rank."""
    kept: dict[object, Trace] = {}
    pairs = []
    for fault, inside in SEEN[first : first + CHUNK]:
        # Without the fault nothing is poisoned, and no update is the one at which it acts; faults share such runs.
        clean = replace(inside, clause="", by=0, case=inside.case.but(poison=None), at=None)
        key = (fault.right, clean)
        if key not in kept:
            kept[key] = Watched(fault.right, clean).run()
        pairs.append((kept[key], Watched(fault.loop, inside).run()))
    return pairs


def alone(numbers: Sequence[int]) -> list[list[tuple[str, int]]]:
    """What the one line finds of faults for which a watch can be told more."""
    return [Watched(SEEN[each][0].loop, replace(SEEN[each][1], lines=())).run().found for each in numbers]


def uncaught(first: int, ranks: Sequence[list[Pair]], *, later: int) -> dict[str, object]:
    """Of the faults from `first` on: what was found of those that their clause does not find on all ranks alike, by
    `later` updates after the catalogue's step, or whose run without them is not silent."""
    odd: dict[str, object] = {}
    for (fault, inside), *pairs in zip(SEEN[first:], *ranks, strict=False):
        silent = all(right.found == [] for right, _ in pairs)
        one, other = (wrong.found for _, wrong in pairs)
        caught = any(clause == inside.clause and step <= inside.by + later for clause, step in one)
        if not (silent and caught and one == other):
            odd[fault.name] = [(right.found, wrong.found) for right, wrong in pairs], (inside.clause, inside.by)
    return odd


def unseen_alone(
    numbers: Sequence[int], ranks: Sequence[list[list[tuple[str, int]]]], *, later: int
) -> dict[str, object]:
    """The same for what `alone` found of the faults of these numbers, by the clause that is said to need no more."""
    odd: dict[str, object] = {}
    for number, found, there in zip(numbers, *ranks, strict=True):
        fault, inside = SEEN[number]
        by = max(inside.by, inside.alone_by) + later
        if found != there or not any(clause == inside.alone and step <= by for clause, step in found):
            odd[fault.name] = found, there, (inside.alone, by)
    return odd


class Pairs(Sequence[list[Pair]]):
    """By fault, then by rank: what a run without it left and found, and one with it; run as they are asked for."""

    def __init__(self) -> None:
        self._parts: dict[int, list[list[Pair]]] = {}

    def __len__(self) -> int:
        return len(SEEN)

    def __getitem__(self, number: Any) -> Any:
        if not 0 <= number < len(SEEN):
            raise IndexError(number)
        part, place = divmod(number, CHUNK)
        if part not in self._parts:
            by_rank = [outcome.get() for outcome in run_ranks(WORLD, both, part * CHUNK, deadline_s=DEADLINE_S)]
            self._parts[part] = [list(pairs) for pairs in zip(*by_rank, strict=True)]
        return self._parts[part][place]


@pytest.fixture(scope="module")
def seen() -> Pairs:
    """All of them."""
    return Pairs()


numbered = pytest.mark.parametrize(
    ("number", "inside"), list(enumerate(inside for _, inside in SEEN)), ids=[fault.name for fault, _ in SEEN]
)


@numbered
def test_the_fault_changes_state(seen: Pairs, number: int, inside: Inside) -> None:
    """What is planted is real: on some rank, the run leaves other weights, moments, rates or reports than without."""
    assert any(right.states != wrong.states for right, wrong in seen[number])


@numbered
def test_the_fault_is_caught_by_its_clause_in_time(seen: Pairs, number: int, inside: Inside) -> None:
    """The clause that names the fault finds it, on every rank alike, at the step of the catalogue or earlier."""
    found = [wrong.found for _, wrong in seen[number]]
    assert found[0] == found[1]
    steps = [step for clause, step in found[0] if clause == inside.clause]
    assert steps, f"found only {found[0]}"
    assert min(steps) <= inside.by


def test_the_one_line_sees_those_that_are_said_to_need_no_more() -> None:
    """By another clause, on every rank alike, and no later than is said."""
    numbers = [number for number, (_, inside) in enumerate(SEEN) if inside.alone]
    ranks = [outcome.get() for outcome in run_ranks(WORLD, alone, numbers, deadline_s=DEADLINE_S)]
    assert unseen_alone(numbers, ranks, later=0) == {}


@numbered
def test_the_same_run_without_the_fault_raises_nothing(seen: Pairs, number: int, inside: Inside) -> None:
    """The watch that catches the fault, told the same lines, is silent on the run that is right."""
    assert [right.found for right, _ in seen[number]] == [[], []]


@pytest.mark.timeout(900)  # it makes again what other workers of a parallel run made
def test_the_table_in_the_docs_is_what_was_seen(seen: Pairs) -> None:
    """docs/watch-faults.md says for each fault the lines, the clause and the step; `ANDON_WRITE_DOCS=1` writes it."""
    path = Path(__file__).parents[2] / "docs" / "watch-faults.md"
    text = document(seen)
    if os.environ.get("ANDON_WRITE_DOCS"):
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text


def document(seen: Pairs) -> str:
    """The table, from what was seen on rank 0, and why some faults are not in it."""
    lines = [
        "# Faults that `andon.watch` catches",
        "",
        "Each was planted in a data-parallel loop written by hand (2 ranks, gloo, LoRA, AdamW, clipping, two",
        "micro-batches, a ragged last batch), shown to change state, and caught; the same run without it raised",
        "nothing. They are the faults that [claims see from outside](loop-faults.md), declared once. This table is",
        "written by `tests/watch/test_planted_faults.py`. `step` is the update of the finding (0: at the start), `by`",
        "the step at which the fault shows at the latest. Lines beside the one line `andon.watch(model, opt)`: the",
        "arguments `plan`, `contents`, `reference` and so on, and the calls `w.batch`, `w.reduced` and so on.",
        "Where nobody is seen to reduce gradients (F02, nothing reduced) the finding comes after the update, as a",
        "suspicion: weights may be brought together later. Where they never are, it is a violation at the close.",
        "A base that all ranks changed alike (F68, base touched) is a suspicion: a loop may do that on purpose.",
        "So is a scale of the gradient that the layout explains (`gradient-scale`): a loss may be weighed on purpose.",
        "Means of unequal parts that are averaged (F17, F28) are no finding without more lines: a closing line says",
        "in how many updates a term counted more than another, and by how much.",
        "",
        "| fault | what | lines needed | clause | step | by |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    rows = zip(SEEN, seen, strict=True)
    lines += [
        _row(fault, inside, pairs[0][1]) for (fault, inside), pairs in sorted(rows, key=lambda row: row[0][0].code)
    ]
    codes = sorted({fault.code for fault, _ in SEEN})
    alone = [
        code
        for code in codes
        if any(fault.code == code and (inside.alone or not inside.lines) for fault, inside in SEEN)
    ]
    lines += ["", f"By the one line alone, in one of their forms at least: {len(alone)} of {len(codes)} entries of the"]
    lines += [f"catalogue, {', '.join(alone)}."]
    lines += ["", "Of the faults that claims see, these are not here:", ""]
    lines += [f"- {fault.name}: {fault.inside}." for fault in FAULTS if isinstance(fault.inside, str)]
    return "\n".join(lines) + "\n"


def _row(fault: LoopFault, inside: Inside, wrong: Trace) -> str:
    steps = [step for clause, step in wrong.found if clause == inside.clause]
    told = ", ".join(inside.lines) or "none"
    if inside.alone:
        told += f"; none for `{inside.alone}`" + f" at {inside.alone_by}" * (inside.alone_by > inside.by)
    step = str(min(steps)) if steps else "missed"
    return f"| {fault.code} | {fault.what} | {told} | `{inside.clause}` | {step} | {inside.by} |"
