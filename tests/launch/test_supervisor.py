"""The supervisor's own clock: no fork server and no torch here, so nobody else ends what it does not end."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from andon.console.messages import Exit
from andon.launch import fork_server, launcher
from andon.launch.context import collected, die_with_parent
from andon.launch.launcher import LaunchResult, Supervisor
from andon.launch.report import UNSEEN, Report, path_of
from andon_contracts.liveness.process import start_time
from tests.launch.pipes import PATIENCE_S, Pipe


class Rank:
    """A process that ends by SIGKILL alone. `untold`: nobody reports its exit code, as by a fork server that hangs."""

    def __init__(self) -> None:
        before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which the process inherits
        self.process = subprocess.Popen(["sleep", "3600"])
        signal.signal(signal.SIGTERM, before)
        self.pid: int | None = None
        self.sentinel = os.pidfd_open(self.process.pid)
        self.untold = False
        self._never, self._writing = os.pipe()

    def start(self) -> None:
        self.pid = self.process.pid
        if self.untold:
            self.sentinel = self._never

    def kill(self) -> None:
        self.process.kill()

    @property
    def exitcode(self) -> int | None:
        return None if self.untold else self.process.poll()


@pytest.fixture(autouse=True)
def short_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "END_S", 0.2)
    monkeypatch.setattr(launcher, "EXITS_S", 0.2)


@pytest.fixture
def ranks() -> Iterator[list[Rank]]:
    started = [Rank() for _ in range(3)]
    yield started
    for rank in started:
        rank.process.kill()
        rank.process.wait()


def watch(ranks: list[Rank], folder: Path, *, silence_s: float = math.inf, launch: str = "") -> LaunchResult:
    """What a supervisor makes of it; fails if it does not come to an end."""
    ended: list[LaunchResult] = []
    watching = Supervisor(cast("Any", ranks), folder, 3600, silence_s, launch=launch)
    thread = threading.Thread(target=lambda: ended.append(watching.run()), daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert ended, "the supervisor waits for ever"
    return ended[0]


def after_looks(monkeypatch: pytest.MonkeyPatch, looks: int, act: Callable[[], object]) -> None:
    look, seen = Supervisor._look, list[None]()

    def counted(self: Supervisor) -> None:
        look(self)
        seen.append(None)
        if len(seen) == looks:
            act()

    monkeypatch.setattr(Supervisor, "_look", counted)


def test_once_a_rank_has_died_the_others_are_killed(tmp_path: Path, ranks: list[Rank]) -> None:
    ranks[2].process.send_signal(signal.SIGSTOP)
    ranks[0].process.kill()
    ended = watch(ranks, tmp_path)
    assert ended.exits == dict.fromkeys(range(3), -signal.SIGKILL)
    assert (ended.exit, ended.first and ended.first.rank) == (Exit.RANK_LOST, 0)


def test_exit_codes_that_nobody_reports_are_not_waited_for(
    tmp_path: Path, ranks: list[Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_server, "how_it_ended", lambda seconds: "it was killed")
    for rank in ranks:
        rank.untold = True
    ranks[0].process.kill()
    ended = watch(ranks, tmp_path)
    assert ended.exits == {0: UNSEEN, 1: -signal.SIGKILL, 2: -signal.SIGKILL}
    assert ended.cause == "rank 0 of 3 was lost together with the process that started it: it was killed"


def test_a_rank_that_is_stopped_is_given_up(tmp_path: Path, ranks: list[Rank]) -> None:
    """Alone in its world nobody else misses it: the run would hang for ever."""
    ranks[0].process.send_signal(signal.SIGSTOP)
    ended = watch(ranks[:1], tmp_path, silence_s=0.1)
    assert ended.exit is Exit.RANK_SILENT
    assert ended.cause.startswith("rank 0 did not run for 0.1 s: stopped by a signal (SIGSTOP)")
    assert ranks[0].process.wait(PATIENCE_S) == -signal.SIGKILL


def test_a_rank_that_finished_takes_nobody_with_it(
    tmp_path: Path, ranks: list[Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "END_S", 0.0)
    Report(0, int(Exit.OK), "finished", 1.0).write(tmp_path)
    ranks[0].process.kill()
    then: list[int | None] = []
    after_looks(monkeypatch, 5, lambda: (then.append(ranks[1].process.poll()), ranks[1].process.kill()))
    watch(ranks[:2], tmp_path)
    assert then == [None]


def test_ranks_that_never_start_are_not_waited_for(
    tmp_path: Path, ranks: list[Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "START_S", 0.0)
    late = threading.Event()
    monkeypatch.setattr(Rank, "start", lambda rank: (late.wait(PATIENCE_S), setattr(rank, "pid", rank.process.pid)))
    ended = watch(ranks, tmp_path)
    assert (ended.exit, ended.cause) == (Exit.RANK_SILENT, "no rank started within 0 s")
    late.set()  # whatever appears later is ended
    assert [rank.process.wait(PATIENCE_S) for rank in ranks] == [-signal.SIGKILL] * 3


def test_a_start_that_fails_leaves_no_rank(tmp_path: Path, ranks: list[Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError(24, "too many open files")

    monkeypatch.setattr(ranks[2], "start", fail)
    ended = watch(ranks, tmp_path)
    assert (ended.exit, ended.exits) == (Exit.CRASHED, {})
    assert ended.cause == "no rank could be started: OSError: [Errno 24] too many open files"
    assert [rank.process.wait(PATIENCE_S) for rank in ranks[:2]] == [-signal.SIGKILL] * 2


def test_a_watch_that_fails_leaves_no_rank(tmp_path: Path, ranks: list[Rank]) -> None:
    path_of(tmp_path, 0).parent.mkdir()
    path_of(tmp_path, 0).write_text("not JSON")
    ranks[0].process.kill()
    with pytest.raises(ValueError, match=r"rank-0\.json"):
        Supervisor(cast("Any", ranks), tmp_path, 3600).run()
    assert [rank.process.wait(PATIENCE_S) for rank in ranks] == [-signal.SIGKILL] * 3


def test_a_signal_to_the_group_is_seen_with_what_it_did(
    tmp_path: Path, ranks: list[Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks have ended on it; a launch that did not know of it would be restarted."""

    def signalled(rank: Rank) -> int | None:
        os.kill(os.getpid(), signal.SIGTERM)
        return int(Exit.PREEMPTED)

    ranks[0].process.kill()
    monkeypatch.setattr(Rank, "exitcode", property(signalled))
    with collected():
        ended = Supervisor(cast("Any", ranks[:1]), tmp_path, 3600).run()
    assert (ended.exit, ended.asked_by) == (Exit.PREEMPTED, signal.SIGTERM)


def test_a_second_interrupt_kills_ranks_that_appear_later(
    tmp_path: Path, ranks: list[Rank], capsys: pytest.CaptureFixture[str]
) -> None:
    with collected():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        ended = watch(ranks, tmp_path)
    said = "andon: SIGINT: ending at the next step boundary; a second one ends at once\n"
    assert capsys.readouterr().err == said
    assert (ended.exit, ended.cause) == (Exit.RANK_LOST, "all ranks were killed: a second SIGINT asked for it")
    assert all(rank.process.wait(PATIENCE_S) == -signal.SIGKILL for rank in ranks)


def test_the_success_of_another_launch_does_not_excuse_a_death(tmp_path: Path, ranks: list[Rank]) -> None:
    """Rank 0 ended without a report; that a rank 0 of another launch finished must not keep the others waiting."""
    Report(0, int(Exit.OK), "finished", 1.0, launch="b" * 32).write(tmp_path)
    ranks[0].process.kill()
    assert watch(ranks, tmp_path, launch="a" * 32).exits == dict.fromkeys(range(3), -signal.SIGKILL)


# A rank never outlives its launcher: real processes, none of them with torch.


RANK = """
import os, sys, threading
from andon.launch.context import die_with_parent
pipe = os.open(sys.argv[1], os.O_WRONLY)
die_with_parent(int(sys.argv[2]), poll_s=float(sys.argv[3]))
os.write(pipe, b"guarded %d\\n" % os.getpid())
threading.Event().wait()
"""
PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", *sys.argv[1:]])
child.wait()
"""


Processes = list["subprocess.Popen[bytes]"]


@pytest.fixture
def processes() -> Iterator[Processes]:
    started: Processes = []
    yield started
    for process in started:
        process.kill()
        process.wait()


def start(processes: Processes, *arguments: object) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", *map(str, arguments)])
    processes.append(process)
    return process


def test_a_rank_dies_with_an_agent_that_is_not_its_parent(pipe: Pipe, processes: Processes) -> None:
    """With a forkserver between them only the watching thread sees the agent go; SIGKILL leaves it no say."""
    agent = start(processes, "import threading; threading.Event().wait()")
    rank = start(processes, RANK, pipe.path, agent.pid, 0.2)
    pipe.lines(1)
    agent.kill()
    os.waitid(os.P_PID, agent.pid, os.WEXITED | os.WNOWAIT)
    assert start_time(agent.pid) is None  # nobody has reaped it: a zombie counts as gone
    pipe.wait_until_all_are_gone()
    assert rank.wait(PATIENCE_S) == -signal.SIGKILL


def test_the_kernel_ends_a_rank_whose_parent_dies(pipe: Pipe, processes: Processes) -> None:
    """The death signal alone is enough: the thread looks once an hour, at an agent that lives on."""
    parent = start(processes, PARENT, RANK, pipe.path, os.getpid(), 3600)
    pipe.lines(1)
    parent.kill()
    pipe.wait_until_all_are_gone()


def test_a_rank_whose_agent_is_gone_already_does_not_start(pipe: Pipe, processes: Processes) -> None:
    agent = start(processes, "pass")
    agent.wait(PATIENCE_S)
    rank = start(processes, RANK, pipe.path, agent.pid, 3600)
    assert rank.wait(PATIENCE_S) == -signal.SIGKILL
    pipe.wait_until_all_are_gone()


def test_a_pid_that_is_none_is_refused() -> None:
    """0 and below mean groups of processes to the kernel."""
    with pytest.raises(ValueError, match="launcher_pid"):
        die_with_parent(0)


@pytest.mark.parametrize(("parent", "expected"), [("os.getppid()", 0), ("os.getppid() + 1", -signal.SIGKILL)])
def test_a_process_whose_parent_has_ended_already_ends_at_once(parent: str, expected: int) -> None:
    """The kernel's death signal comes only for a parent that ends later: one that is another by now is told apart."""
    script = f"import os; from andon.launch.context import bind_to_parent; bind_to_parent({parent})"
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=PATIENCE_S).returncode == expected
