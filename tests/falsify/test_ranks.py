"""Ranks: reused while they are well, replaced when they are not; with the suite's process all of it is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from andon_falsify.ranks.pool import RankPool

HERE = "tests.falsify.rank_work"


@pytest.fixture
def pool() -> Iterator[RankPool]:
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
    before, again = (pool.run(f"{HERE}:describe", "") for _ in range(2))
    assert [answer.value[2] for answer in before] == [answer.value[2] for answer in again] == pool.pids
    answers = pool.run(f"{HERE}:{work}", 1)
    assert said in answers[1].error
    assert not any(psutil.pid_exists(answer.value[2]) for answer in before)
    after = pool.run(f"{HERE}:describe", "again")
    assert [answer.value[:2] for answer in after] == [("again", 0), ("again", 1)]


def test_a_rank_that_hangs_is_killed_by_its_pid() -> None:
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
    written = tmp_path / "pid"
    answers = pool.run(f"{HERE}:{work}", (1, str(written)))
    left = int(written.read_text())
    assert any(f"left processes behind, now ended: {left} (sleep 1000)" in answer.error for answer in answers)
    assert not psutil.pid_exists(left) or psutil.Process(left).status() == psutil.STATUS_ZOMBIE
    assert [answer.error for answer in pool.run(f"{HERE}:describe", "again")] == ["", ""]


def test_what_ends_with_its_rank_is_nobodys_fault(pool: RankPool, tmp_path: Path) -> None:
    written = tmp_path / "pid"
    answers = pool.run(f"{HERE}:employ_on", (1, str(written)))
    assert [answer.error for answer in answers] == ["", ""]
    assert not psutil.pid_exists(int(written.read_text()))


ROOT = Path(__file__).resolve().parents[2]
_MARK = "ANDON_TEST_SUITE"
_WAITING = """
from andon_falsify.ranks import server
server.SERVER = server.Server(["andon_falsify.ranks.adoption"])  # which loads no torch
process = server.RankProcess(target=int)
process.start()
process.join()
print("ready", flush=True)
process.join(input())
"""
_INTERRUPTED = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background begins with it ignored
from andon_falsify.ranks.pool import RankPool
try:
    with_ranks = RankPool(1).run("tests.falsify.rank_work:describe", "")
except KeyboardInterrupt:
    print("interrupted")
"""


class Suite:
    def __init__(self, program: str, folder: Path) -> None:
        self.mark = uuid.uuid4().hex
        paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        self.process = subprocess.Popen(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONPATH": paths, "TMPDIR": str(folder), _MARK: self.mark},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def running(self) -> list[psutil.Process]:
        found = psutil.process_iter(["environ", "status"])
        ours = [each for each in found if (each.info["environ"] or {}).get(_MARK) == self.mark]
        return [each for each in ours if each.pid != self.process.pid and each.info["status"] != psutil.STATUS_ZOMBIE]

    def end(self) -> tuple[str, list[psutil.Process]]:
        """What it has said by its end, and what was running at that moment: a pipe that is still held comes later."""
        self.process.wait()
        left = self.running()
        return self.process.communicate()[0], left

    def loading(self) -> psutil.Process:
        while True:
            for each in self.running():
                with suppress(OSError):  # it has just ended
                    if "libtorch" in Path(f"/proc/{each.pid}/maps").read_text():
                        return each
            assert self.process.poll() is None, "it ended before it had a server"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Suite]]:
    held: list[Suite] = []

    def begin(program: str) -> Suite:
        held.append(Suite(program, tmp_path))
        return held[-1]

    yield begin
    for suite in held:
        for each in suite.running():
            each.kill()
        suite.process.kill()
        suite.process.communicate()


def test_an_interruption_while_the_server_loads_is_one_line(start: Callable[[str], Suite], tmp_path: Path) -> None:
    """Ctrl-C reaches the whole group: the suite alone answers it, and the server has gone when the suite has."""
    suite = start(_INTERRUPTED)
    suite.loading()
    os.killpg(suite.process.pid, signal.SIGINT)
    said, left = suite.end()
    assert left == []
    assert (said, suite.process.returncode) == ("interrupted\n", 0)
    assert list(tmp_path.iterdir()) == []


def test_a_suite_that_is_killed_leaves_nothing(start: Callable[[str], Suite], tmp_path: Path) -> None:
    suite = start(_WAITING)
    assert suite.process.stdout.readline() == "ready\n"
    servers = suite.running()
    assert list(tmp_path.iterdir()) != []
    suite.process.kill()
    for each in servers:
        each.wait()
    assert list(tmp_path.iterdir()) == []
