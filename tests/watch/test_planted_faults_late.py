"""Planted faults, each update judged before the next one, as with a GPU: what is caught otherwise is caught so."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

from andon_contracts.watch import updates
from andon_falsify.faults.planting import patched
from tests.support.ranks import run_ranks
from tests.watch.test_planted_faults import CHUNK, SEEN, WORLD, Pair, alone, both, uncaught, unseen_alone

pytestmark = pytest.mark.timeout(300)
DEADLINE_S = 200.0


def _late(work: Callable[[Any], Any], argument: Any) -> Any:
    """`work`, with no update judged before the next one, or the close."""
    with ExitStack() as stack:
        patched(stack, updates, "_judged_late", lambda subject: True)
        return work(argument)


def both_late(first: int) -> list[Pair]:
    """As `both`."""
    found: list[Pair] = _late(both, first)
    return found


def alone_late(numbers: list[int]) -> list[list[tuple[str, int]]]:
    """As `alone`."""
    found: list[list[tuple[str, int]]] = _late(alone, numbers)
    return found


@pytest.mark.parametrize("first", range(0, len(SEEN), CHUNK))
def test_every_fault_is_caught_late_as_at_once(first: int) -> None:
    """By its clause, on every rank alike, by the same step; and the run without it raises nothing there."""
    ranks = [outcome.get() for outcome in run_ranks(WORLD, both_late, first, deadline_s=DEADLINE_S)]
    assert uncaught(first, ranks, later=0) == {}


def test_the_one_line_sees_late_what_it_sees_at_once() -> None:
    """What is said to need no further line, on every rank alike."""
    numbers = [number for number, (_, inside) in enumerate(SEEN) if inside.alone]
    ranks = [outcome.get() for outcome in run_ranks(WORLD, alone_late, numbers, deadline_s=DEADLINE_S)]
    assert unseen_alone(numbers, ranks, later=0) == {}
