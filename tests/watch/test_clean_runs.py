"""A watch says nothing of a loop that is right, and it did look."""

from __future__ import annotations

import pytest

from tests.support.ranks import run_ranks
from tests.watch.clean import KINDS, STEPS, run_all

PARTS = [list(KINDS)[first : first + 5] for first in range(0, len(KINDS), 5)]


@pytest.fixture(scope="module")
def seen() -> dict[str, list[tuple[list[str], int]]]:
    """By kind, then by rank: what was found and how often a clause was evaluated."""
    found: dict[str, list[tuple[list[str], int]]] = {}
    for part in PARTS:
        by_rank = [outcome.get() for outcome in run_ranks(2, run_all, part)]
        found |= {name: [one[name] for one in by_rank] for name in part}
    return found


@pytest.mark.parametrize("name", KINDS)
def test_a_right_loop_raises_nothing(seen: dict[str, list[tuple[list[str], int]]], name: str) -> None:
    """No clause complains, and more than ten were evaluated at each update that was made."""
    for found, evaluations in seen[name]:
        assert found == []
        assert evaluations > 10 * STEPS / 2
