"""A rank never outlives its agent: real processes, none of them with torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from andon.launch.orphan import die_with_parent
from andon_contracts.liveness.process import start_time
from tests.launch.pipes import PATIENCE_S, Pipe

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
