"""The validation split."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from andon.console.problems import InputError
from andon.data.rows import frozen_split

COUNTS = st.integers(2, 400)
FRACTIONS = st.floats(0.001, 0.999)
SEEDS = st.integers(0, 2**63 - 1)


@given(COUNTS, FRACTIONS, SEEDS)
def test_every_row_is_in_exactly_one_part_and_neither_is_empty(count: int, fraction: float, seed: int) -> None:
    train, validation = frozen_split(count, fraction, seed)
    assert sorted(train + validation) == list(range(count))
    assert list(train) == sorted(train)
    assert list(validation) == sorted(validation)
    assert 1 <= len(validation) <= count - 1
    assert abs(len(validation) - count * fraction) <= 0.5 or len(validation) in (1, count - 1)


def test_every_row_is_as_likely_to_be_held_back() -> None:
    drawn = [0] * 10
    for seed in range(2000):
        for place in frozen_split(10, 0.3, seed)[1]:
            drawn[place] += 1
    deviation = (2000 * 0.3 * 0.7) ** 0.5
    assert all(abs(times - 600) < 5 * deviation for times in drawn)


def test_fraction_zero_holds_nothing_back() -> None:
    assert frozen_split(3, 0.0, 1) == ((0, 1, 2), ())
    assert frozen_split(1, 0.0, 1) == ((0,), ())


@pytest.mark.parametrize(("count", "fraction"), [(1, 0.1), (0, 0.1), (5, 1.0), (5, -0.1), (5, float("nan"))])
def test_what_cannot_be_split_is_refused(count: int, fraction: float) -> None:
    """A split that would leave no row to train on, or a fraction that is none, is the user's mistake."""
    with pytest.raises(InputError):
        frozen_split(count, fraction, 0)
