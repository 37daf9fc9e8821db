"""Splits: nothing lost, nothing doubled, nothing out of order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from andon.step.shard import balanced_bounds, shard_samples

counts = st.integers(0, 300)
parts = st.integers(1, 70)


@given(counts, parts)
def test_balanced_ranges_cover_and_differ_by_at_most_one(count: int, number: int) -> None:
    bounds = balanced_bounds(count, number)
    assert [row for start, end in bounds for row in range(start, end)] == list(range(count))
    sizes = [end - start for start, end in bounds]
    assert len(sizes) == number
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


def test_balanced_ranges_by_hand() -> None:
    assert balanced_bounds(10, 4) == ((0, 3), (3, 6), (6, 8), (8, 10))
    assert balanced_bounds(2, 4) == ((0, 1), (1, 2), (2, 2), (2, 2))


@pytest.mark.parametrize(("count", "number"), [(-1, 2), (3, 0), (3, -1)])
def test_an_impossible_split_is_refused(count: int, number: int) -> None:
    with pytest.raises(ValueError, match=f"{count} items into {number} parts"):
        balanced_bounds(count, number)


@given(st.lists(st.integers()), parts)
def test_shards_keep_every_object_once_in_order(values: list[int], workers: int) -> None:
    """F-DP-002: disjoint, complete, in order; each shard has floor(n / workers), the last also the remainder."""
    samples = [[value] for value in values]
    shards = shard_samples(samples, workers)
    joined = [sample for shard in shards for sample in shard]
    assert len(joined) == len(samples)
    assert all(a is b for a, b in zip(joined, samples, strict=True))
    size, rest = divmod(len(samples), workers)
    assert [len(shard) for shard in shards] == [size] * (workers - 1) + [size + rest]


@pytest.mark.parametrize("workers", [0, -3])
def test_fewer_than_one_worker_is_the_callers_mistake(workers: int) -> None:
    """V13: no worker is a `ValueError` that says what was passed, and no division by zero."""
    with pytest.raises(ValueError, match=f"at least 1, got {workers}"):
        shard_samples([1, 2], workers)
