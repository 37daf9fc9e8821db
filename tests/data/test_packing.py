"""Packs: every row once, none too long, little padding, and the same for the same lengths."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from andon.tasks.sft import best_fit

HISTOGRAM = {
    range(16, 64): 900,
    range(64, 128): 1900,
    range(128, 256): 2800,
    range(256, 512): 2300,
    range(512, 1024): 1300,
    range(1024, 2048): 500,
    range(2048, 2049): 300,
}
"""Rows by their tokens, as sets of instructions have them: many of some hundred, few long ones, 3 % that were cut."""
LENGTHS = st.lists(st.integers(1, 30), max_size=60)


def plainly(lengths: list[int], capacity: int) -> list[list[int]]:
    packs: list[list[int]] = []
    room: list[int] = []
    for place in sorted(range(len(lengths)), key=lambda place: (-lengths[place], place)):
        fitting = [(left, pack) for pack, left in enumerate(room) if left >= lengths[place]]
        if not fitting:
            packs.append([])
            room.append(capacity)
        pack = min(fitting)[1] if fitting else len(packs) - 1
        packs[pack].append(place)
        room[pack] -= lengths[place]
    return packs


@given(LENGTHS, st.integers(30, 50))
def test_packs_are_those_of_the_plain_search(lengths: list[int], capacity: int) -> None:
    assert best_fit(lengths, capacity) == plainly(lengths, capacity)


def test_packs_of_instructions_are_padded_by_two_percent_at_most() -> None:
    """Of a fixed histogram, at 2,048 tokens; one row a pack would pad four fifths."""
    lengths = [where[place * len(where) // rows] for where, rows in HISTOGRAM.items() for place in range(rows)]
    random.Random(0).shuffle(lengths)
    assert len(lengths) == 10_000
    assert sum(lengths) >= 0.98 * 2048 * len(best_fit(lengths, 2048))
    assert sum(lengths) < 0.2 * 2048 * len(lengths)


@pytest.mark.parametrize("length", [0, -1, 11])
def test_a_length_that_no_pack_can_hold_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match=f"row 1 has {length} tokens"):
        best_fit([1, length], 10)


def test_a_hundred_thousand_rows_are_packed_as_few_rows_are() -> None:
    lengths = [1500, 548] * 50_000
    random.Random(1).shuffle(lengths)
    packs = best_fit(lengths, 2048)
    assert len(packs) == 50_000
    assert sum(lengths) == 2048 * len(packs)
