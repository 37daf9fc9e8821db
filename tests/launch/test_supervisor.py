"""The supervisor's own clock: no torch here, so nobody else ends what it does not end."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from andon.console.exits import Exit
from andon.launch import supervisor
from andon.launch.orphan import die_with_parent
from andon.launch.report import Report, path_of
from andon.launch.supervisor import Supervisor, Wake, Watched
from andon_contracts.liveness.process import start_time
from tests.launch.pipes import PATIENCE_S, Pipe

DEAF = "import signal, threading; signal.signal(signal.SIGTERM, signal.SIG_IGN); threading.Event().wait()"


Ranks = dict[int, "subprocess.Popen[bytes]"]


@dataclass
class Agent:
    pids: dict[int, int] = field(default_factory=dict)
    done: bool = False
    ending: bool = False

    def look(self) -> None:
        """Nothing to see."""


@pytest.fixture(autouse=True)
def short_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "END_S", 0.2)
    monkeypatch.setattr(supervisor, "AGENT_S", 0.2)


@pytest.fixture
def wake() -> Iterator[Wake]:
    found = Wake()
    yield found
    found.close()


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    """Three processes that end by SIGKILL alone."""
    started = {rank: subprocess.Popen([sys.executable, "-c", DEAF]) for rank in range(3)}
    yield started
    for process in started.values():
        process.kill()
        process.wait()


def pids_of(ranks: Ranks) -> dict[int, int]:
    return {rank: process.pid for rank, process in ranks.items()}


def watch(agent: Agent, wake: Wake, folder: Path, silence_s: float = math.inf, launch: str = "") -> Watched:
    """What a supervisor sees; fails where it does not come to an end."""
    seen: list[Watched] = []
    watching = Supervisor(agent, wake, folder, 3600, silence_s, launch=launch)
    thread = threading.Thread(target=lambda: seen.append(watching.run()), daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert seen, "the supervisor waits for ever"
    return seen[0]


def test_once_a_rank_has_died_the_others_are_killed_and_a_stuck_agent_is_left(
    tmp_path: Path, wake: Wake, ranks: Ranks
) -> None:
    ranks[2].send_signal(signal.SIGSTOP)
    ranks[0].kill()
    seen = watch(Agent(pids_of(ranks)), wake, tmp_path)
    assert seen.killed == {1, 2}
    assert set(seen.died) == {0, 1, 2}
    assert seen.died[0] < min(seen.died[1], seen.died[2])
    assert [process.wait(PATIENCE_S) for process in ranks.values()] == [-signal.SIGKILL] * 3


def test_a_rank_that_is_stopped_is_given_up(tmp_path: Path, wake: Wake, ranks: Ranks) -> None:
    """Alone in its world nobody else misses it: the run would hang for ever."""
    ranks[0].send_signal(signal.SIGSTOP)
    seen = watch(Agent({0: ranks[0].pid}), wake, tmp_path, silence_s=0.1)
    assert seen.verdict is not None
    assert seen.verdict[0] is Exit.RANK_SILENT
    assert seen.verdict[1].startswith("rank 0 did not run for 0.1 s: stopped by a signal (SIGSTOP)")
    assert ranks[0].wait(PATIENCE_S) == -signal.SIGKILL


class CountingWake(Wake):
    """Calls `then` once the supervisor has looked five times; it reads its wake twice at each look."""

    def __init__(self, then: Callable[[], object]) -> None:
        super().__init__()
        self._looks, self._then = 0, then

    def wait(self, seconds: float) -> list[int]:
        self._looks += 1
        if self._looks == 10:
            self._then()
        return super().wait(seconds)


def test_a_rank_that_finished_takes_nobody_with_it(
    tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "END_S", 0.0)
    for rank in (0, 1):
        Report(rank, int(Exit.OK), "finished", 1.0).write(tmp_path)
    ranks[0].kill()
    wake = CountingWake(then=ranks[1].kill)
    seen = watch(Agent({0: ranks[0].pid, 1: ranks[1].pid}), wake, tmp_path)
    wake.close()
    assert seen.killed == set()
    assert set(seen.died) == {0, 1}


def test_ranks_whose_agent_is_gone_are_ended(tmp_path: Path, wake: Wake, ranks: Ranks) -> None:
    seen = watch(Agent(pids_of(ranks), done=True), wake, tmp_path)
    assert seen.killed == {0, 1, 2}


def test_ranks_that_never_start_are_not_waited_for(tmp_path: Path, wake: Wake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "START_S", 0.0)
    assert watch(Agent(), wake, tmp_path).verdict == (Exit.RANK_SILENT, "no rank started within 0 s")


def test_a_watch_that_fails_leaves_no_rank(tmp_path: Path, wake: Wake, ranks: Ranks) -> None:
    path_of(tmp_path, 0).parent.mkdir()
    path_of(tmp_path, 0).write_text("not JSON")
    ranks[0].kill()
    with pytest.raises(ValueError, match=r"rank-0\.json"):
        Supervisor(Agent(pids_of(ranks)), wake, tmp_path, 3600).run()
    assert [process.wait(PATIENCE_S) for process in ranks.values()] == [-signal.SIGKILL] * 3


class Signalled(Agent):
    """Its ranks have ended on a signal to the whole group, which reaches the launcher while it looks at them."""

    def look(self) -> None:
        """What came from the agents is read after the group was signalled."""
        os.kill(os.getpid(), signal.SIGTERM)
        self.done = True


def test_a_signal_to_the_group_is_seen_with_what_it_did(tmp_path: Path, wake: Wake) -> None:
    """The ranks' ends, seen first, would be taken for those of agents that leave, and a world that is too small."""
    with wake.listening():
        seen = Supervisor(Signalled(), wake, tmp_path, 3600).run()
    assert seen.asked_by == signal.SIGTERM


def test_a_wake_that_was_closed_may_still_be_rung() -> None:
    wake = Wake()
    wake.close()
    wake.ring()


def test_a_second_interrupt_kills_ranks_that_appear_later(
    tmp_path: Path, wake: Wake, ranks: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    class Starting(Agent):
        def look(self) -> None:
            self.done = self.done or bool(self.pids)
            self.pids = pids_of(ranks)

    with wake.listening():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        seen = watch(Starting(), wake, tmp_path)
    said = "andon: SIGINT: ending at the next step boundary; a second one ends at once\n"
    assert capsys.readouterr().err == said
    assert seen.killed == {0, 1, 2}
    assert seen.verdict == (Exit.RANK_LOST, "all ranks were killed: a second SIGINT asked for it")
    assert all(process.wait() == -signal.SIGKILL for process in ranks.values())


def test_the_success_of_another_launch_does_not_excuse_a_death(tmp_path: Path, wake: Wake, ranks: Ranks) -> None:
    """Rank 0 ended without a report; that a rank 0 of another launch finished must not keep the others waiting."""
    Report(0, int(Exit.OK), "finished", 1.0, launch="b" * 32).write(tmp_path)
    ranks[0].kill()
    assert watch(Agent(pids_of(ranks)), wake, tmp_path, launch="a" * 32).killed == {1, 2}


# A rank never outlives its agent: real processes, none of them with torch.


RANK = """
import os, sys, threading
from andon.launch.orphan import die_with_parent
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
    with pytest.raises(ValueError, match="agent_pid"):
        die_with_parent(0)


@pytest.mark.parametrize(("parent", "expected"), [("os.getppid()", 0), ("os.getppid() + 1", -signal.SIGKILL)])
def test_a_process_whose_parent_has_ended_already_ends_at_once(parent: str, expected: int) -> None:
    """The kernel's death signal comes only for a parent that ends later: one that is another by now is told apart."""
    script = f"import os; from andon.launch.orphan import bind_to_parent; bind_to_parent({parent})"
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=PATIENCE_S).returncode == expected
