"""Work in proportion to speed: measured once, and from then on what the ledger says."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from andon.backend.inprocess import InlineBackend
from andon.console.problems import InputError
from andon.step.plan import BatchPlan
from andon.training.speed import fastest_shares, recorded_shares, shares_of
from andon_contracts.record import RankPart, Step
from tests.inspection.ledgers import step, write
from tests.support.toy import CPU, ROWS, ToyTask, replica

NONE = "0" * 16


@given(st.integers(1, 7), st.lists(st.integers(1, 9), min_size=1, max_size=3))
def test_no_other_shares_end_earlier(count: int, times: list[int]) -> None:

    def end(shares: tuple[int, ...]) -> int:
        return max(share * each for share, each in zip(shares, times, strict=True))

    found = fastest_shares(count, times)
    others = itertools.product(range(count + 1), repeat=len(times))
    assert sum(found) == count
    assert end(found) == min(end(shares) for shares in others if sum(shares) == count)


def test_a_rank_that_is_three_times_as_fast_gets_three_times_as_much() -> None:
    assert fastest_shares(8, [10, 30]) == (6, 2)
    assert fastest_shares(8, [10, 10, 10]) == (3, 3, 2)
    assert fastest_shares(8, [1, 1000]) == (8, 0)


def line(number: int, shares: tuple[int, ...]) -> Step:
    """A step in which the ranks computed as many micro-batches."""
    ends = list(itertools.accumulate(shares))
    parts = [
        RankPart(rank, tuple(range(ends[rank] - share, ends[rank])), (), NONE) for rank, share in enumerate(shares)
    ]
    return step(number, (), world=len(shares), backend="mixed", ranks=tuple(parts))


def written(folder: Path, *all_shares: tuple[int, ...]) -> Path:
    return write(folder / "ledger.jsonl", [line(number, shares) for number, shares in enumerate(all_shares, start=1)])


def test_a_run_that_goes_on_takes_the_shares_of_its_last_steps(tmp_path: Path) -> None:
    path = written(tmp_path, (6, 2), (3, 3, 2), (5, 3), (4, 2, 2))
    assert recorded_shares(path, 2, 8) == (5, 3)
    assert recorded_shares(path, 3, 8) == (4, 2, 2)
    assert recorded_shares(path, 4, 8) is None
    assert recorded_shares(path, 2, 9) is None
    assert recorded_shares(tmp_path / "none", 2, 8) is None


def test_a_damaged_ledger_is_told_of(tmp_path: Path) -> None:
    path = written(tmp_path, (6, 2), (6, 2))
    path.write_bytes(path.read_bytes().replace(b'"leaves":[0', b'"leaves":[1', 1))
    with pytest.raises(InputError, match="who computed what"):
        recorded_shares(path, 2, 8)


@pytest.mark.parametrize("name", ["inline", "mixed"])
def test_ranks_of_one_kind_share_alike(name: str, tmp_path: Path) -> None:
    backend = InlineBackend([CPU, CPU])
    backend.name = name
    plan = BatchPlan(tuple(range(ROWS)), 8, 4, 1, 1)
    assert shares_of(backend, replica(), ToyTask(), plan, 4, tmp_path / "ledger.jsonl") is None
