"""Pools of real ranks: reused while they are well, replaced when they are not, and gone at the end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

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


@pytest.mark.parametrize(
    ("work", "said"),
    [
        ("raise_on", "ArithmeticError: this rank"),
        ("die_on", "ended with exit code 3 without an answer; its last output: nothing goes on"),
        ("kill_on", "was killed by SIGKILL without an answer"),
        ("leave_on", "left by sys.exit(0)"),
        ("lie_on", "it says it is one of 1 ranks, but 2 were started"),
        ("answer_nothing_that_travels_on", "its answer cannot be sent"),
    ],
)
def test_a_rank_that_fails_is_told_apart_and_the_pool_goes_on(pool: RankPool, work: str, said: str) -> None:
    """Ranks that are well answer again. A failure comes back as its text, the old group goes, and new ranks answer."""
    before, again = (pool.run(f"{HERE}:describe", "") for _ in range(2))
    assert [answer.value[2] for answer in before] == [answer.value[2] for answer in again] == pool.pids
    answers = pool.run(f"{HERE}:{work}", 1)
    assert said in answers[1].error
    assert not any(psutil.pid_exists(answer.value[2]) for answer in before)
    after = pool.run(f"{HERE}:describe", "again")
    assert [answer.value[:2] for answer in after] == [("again", 0), ("again", 1)]


def test_a_rank_that_hangs_is_killed_by_its_pid() -> None:
    """The suite goes on without it, says where it stood, and leaves nothing behind."""
    pool = RankPool(2, deadline_s=1.0, grace_s=0.5)
    pids = [answer.value[2] for answer in pool.run(f"{HERE}:describe", "")]
    answers = pool.run(f"{HERE}:hang_on", 0)
    assert "killed; it stood at hang_on in" in answers[0].error
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


@pytest.mark.parametrize("work", ["start_on", "start_and_die_on", "hide_on"])
def test_what_a_rank_leaves_behind_is_named_and_ended(pool: RankPool, tmp_path: Path, work: str) -> None:
    """A child of a rank; one whose rank has died; one in a session of its own whose parents are gone."""
    written = tmp_path / "pid"
    answers = pool.run(f"{HERE}:{work}", (1, str(written)))
    left = int(written.read_text())
    assert any(f"left processes behind, now ended: {left} (sleep 1000)" in answer.error for answer in answers)
    assert not psutil.pid_exists(left) or psutil.Process(left).status() == psutil.STATUS_ZOMBIE
    assert [answer.error for answer in pool.run(f"{HERE}:describe", "again")] == ["", ""]


def test_what_ends_with_its_rank_is_nobodys_fault(pool: RankPool, tmp_path: Path) -> None:
    """A worker that waits for its rank's end of a pipe, as those of data loaders and compilers do."""
    written = tmp_path / "pid"
    answers = pool.run(f"{HERE}:employ_on", (1, str(written)))
    assert [answer.error for answer in answers] == ["", ""]
    assert not psutil.pid_exists(int(written.read_text()))
