"""Every fault of the catalogue that a running loop can show is caught, by its clause and in time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.ranks import run_ranks
from tests.watch.faults_table import CATALOGUE, TABLE
from tests.watch.loop import Trace
from tests.watch.planted import Planted

WORLD = 2
CHUNK = 11
Pair = tuple[Trace, Trace]


def both(first: int) -> list[Pair]:
    """The loops of one part of the table, without and with the fault, on this rank."""
    return [(fault.right().run(), fault.faulty().run()) for fault in TABLE[first : first + CHUNK]]


@pytest.fixture(scope="module")
def seen() -> list[list[Pair]]:
    """By fault, then by rank: what a run without it left and found, and one with it."""
    found: list[list[Pair]] = []
    for first in range(0, len(TABLE), CHUNK):
        by_rank = [outcome.get() for outcome in run_ranks(WORLD, both, first)]
        found += [list(pairs) for pairs in zip(*by_rank, strict=True)]
    return found


def _name(fault: Planted) -> str:
    return f"{fault.code} {fault.what}"


numbered = pytest.mark.parametrize(("number", "fault"), list(enumerate(TABLE)), ids=map(_name, TABLE))


def test_every_fault_of_the_catalogue_is_planted() -> None:
    """At least once each, and nothing is planted that the catalogue does not have."""
    assert {fault.code for fault in TABLE} == CATALOGUE


@numbered
def test_the_fault_changes_state(seen: list[list[Pair]], number: int, fault: Planted) -> None:
    """What is planted is real: on some rank, the run leaves other weights, moments, rates or reports than without."""
    assert any(right.states != wrong.states for right, wrong in seen[number])


@numbered
def test_the_fault_is_caught_by_its_clause_in_time(seen: list[list[Pair]], number: int, fault: Planted) -> None:
    """The clause that names the fault finds it, on every rank alike, at the step of the catalogue or earlier."""
    found = [[(clause, step) for clause, step, _ in wrong.found] for _, wrong in seen[number]]
    assert found[0] == found[1]
    steps = [step for clause, step in found[0] if clause == fault.clause]
    assert steps, f"found only {found[0]}"
    assert min(steps) <= fault.by


@numbered
def test_the_same_run_without_the_fault_raises_nothing(seen: list[list[Pair]], number: int, fault: Planted) -> None:
    """The watch that catches the fault, told the same lines, is silent on the run that is right."""
    assert [right.found for right, _ in seen[number]] == [[], []]


def test_the_table_in_the_docs_is_what_was_seen(seen: list[list[Pair]]) -> None:
    """docs/watch-faults.md says for each fault the lines, the clause and the step; `ANDON_WRITE_DOCS=1` writes it."""
    path = Path(__file__).parents[2] / "docs" / "watch-faults.md"
    text = document(seen)
    if os.environ.get("ANDON_WRITE_DOCS"):
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text


def document(seen: list[list[Pair]]) -> str:
    """The table, from what was seen on rank 0."""
    lines = [
        "# Faults that `andon.watch` catches",
        "",
        "Each was planted in a small data-parallel loop (2 ranks, gloo, LoRA, AdamW, clipping, two micro-batches, a",
        "ragged last batch), shown to change state, and caught; the same run without it raised nothing. This table is",
        "written by `tests/watch/test_planted_faults.py`. `step` is the update of the finding (0: at the start), `by`",
        "the step at which the fault shows at the latest. Lines beside the one line `andon.watch(model, opt)`: the",
        "arguments `plan`, `contents`, `reference` and so on, and the calls `w.batch`, `w.reduced` and so on.",
        "",
        "| fault | what | lines needed | clause | step | by |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for fault, pairs in zip(TABLE, seen, strict=True):
        steps = [step for clause, step, _ in pairs[0][1].found if clause == fault.clause]
        told = ", ".join(fault.lines) or "none"
        step = str(min(steps)) if steps else "missed"
        lines.append(f"| {fault.code} | {fault.what} | {told} | `{fault.clause}` | {step} | {fault.by} |")
    return "\n".join(lines) + "\n"
