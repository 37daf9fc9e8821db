"""Pools of real ranks: reused while they are well, replaced when they are not, and gone at the end."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest

from andon_falsify.ranks.pool import RankPool

HERE = "tests.falsify.rank_work"


@pytest.fixture
def pool() -> Iterator[RankPool]:
    """Two ranks; whoever hangs is given up soon."""
    held = RankPool(2, deadline_s=60.0, grace_s=2.0)
    yield held
    held.close()


def test_the_same_processes_answer_again(pool: RankPool) -> None:
    """Each rank answers for itself, and the next request finds the same processes."""
    first, second = (pool.run(f"{HERE}:describe", word) for word in ("one", "two"))
    assert [answer.value[:2] for answer in first] == [("one", 0), ("one", 1)]
    assert [answer.value[:2] for answer in second] == [("two", 0), ("two", 1)]
    assert [answer.value[2] for answer in first] == [answer.value[2] for answer in second] == pool.pids


@pytest.mark.parametrize(
    ("work", "said"), [("raise_on", "ArithmeticError: this rank"), ("die_on", "without an answer")]
)
def test_a_rank_that_fails_is_told_apart_and_the_pool_goes_on(pool: RankPool, work: str, said: str) -> None:
    """The failure comes back as a value with its text, no rank of the old group stays, and new ones answer."""
    before = pool.run(f"{HERE}:describe", "")
    answers = pool.run(f"{HERE}:{work}", 1)
    assert said in answers[1].error
    assert not any(psutil.pid_exists(answer.value[2]) for answer in before)
    after = pool.run(f"{HERE}:describe", "again")
    assert [answer.value[:2] for answer in after] == [("again", 0), ("again", 1)]


def test_a_rank_that_hangs_is_killed_by_its_pid() -> None:
    """The suite goes on without it; nothing is left behind."""
    pool = RankPool(2, deadline_s=20.0, grace_s=2.0)
    pids = [answer.value[2] for answer in pool.run(f"{HERE}:describe", "")]
    answers = pool.run(f"{HERE}:hang_on", 0)
    assert "killed" in answers[0].error
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert pool.pids == []


def test_the_sentinel_refuses_ranks_that_a_case_left_in_disorder(pool: RankPool) -> None:
    """Contracts that stay switched off would let every later case pass; such ranks are replaced."""
    pool.run(f"{HERE}:describe", "")
    before = pool.pids
    answers = pool.run(f"{HERE}:leave_contracts_off", None)
    assert all("contracts enforced: False" in answer.error for answer in answers)
    pool.run(f"{HERE}:describe", "")
    assert not set(before) & set(pool.pids)
