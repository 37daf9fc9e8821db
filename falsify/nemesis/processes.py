"""The processes of a run, seen from outside: which belong to it, which are ranks, which still run; signals to them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress

import psutil

_SEEN_S = 5.0
"""How long the process table may take to show the effect of a signal."""


def family(pid: int) -> list[int]:
    """A process and all its descendants."""
    try:
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.NoSuchProcess:
        return [pid]


def session(leader: int) -> list[int]:
    """The running processes of the session that `leader` began, orphans included."""

    def belongs(pid: int) -> bool:
        try:
            return os.getsid(pid) == leader
        except ProcessLookupError:
            return False

    return [pid for pid in psutil.pids() if belongs(pid) and alive(pid)]


def marked(variable: str, value: str) -> list[int]:
    """The running processes that were started with this environment variable, in any session.

    A child inherits the environment, so this finds children that began a session of their own.
    """
    found = []
    for pid in psutil.pids():
        with suppress(psutil.Error, OSError):  # the process has ended, or belongs to another user
            if psutil.Process(pid).environ().get(variable) == value and alive(pid):
                found.append(pid)
    return found


def command_line(pid: int) -> str:
    """The arguments of a process, separated by spaces; empty after its end."""
    with suppress(psutil.Error):
        return " ".join(psutil.Process(pid).cmdline())
    return ""


def ranks(members: Iterable[int]) -> list[int]:
    """The children of the launcher's fork server, the oldest first."""
    found: list[psutil.Process] = []
    for pid in members:
        if "forkserver" in command_line(pid):
            with suppress(psutil.NoSuchProcess):
                found += psutil.Process(pid).children()
    return [rank.pid for rank in sorted(found, key=lambda rank: (rank.create_time(), rank.pid))]


def processes_of(victim: str, launcher: int) -> list[int]:
    """The launcher itself, or the ranks that it has started, in order."""
    return [launcher] if victim == "launcher" else ranks(family(launcher))


def state_of(pid: int) -> str:
    """`running`, `stopped` or `dead`. A zombie is dead."""
    try:
        status = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return "dead"
    if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
        return "dead"
    return "stopped" if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP) else "running"


def alive(pid: int) -> bool:
    return state_of(pid) != "dead"


def still_runs(process: psutil.Process) -> bool:
    return process.is_running() and alive(process.pid)


def identified(pids: Iterable[int]) -> list[psutil.Process]:
    """Those of these processes that exist. psutil tells a process from a later one with the same id."""
    found = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(pid))
    return found


def send(pid: int, signum: signal.Signals, *, group: bool = False, pause_s: float = 0.0) -> str | None:
    """Send a signal to a process, or to its group. With `pause_s`, send SIGCONT that many seconds later.

    Returns what the process table then shows; "" for signals other than SIGKILL and SIGSTOP; None if there is no such
    process, or the process table does not show the effect.
    """
    try:
        (os.killpg if group else os.kill)(pid, signum)
    except ProcessLookupError:
        return None
    if signum not in (signal.SIGKILL, signal.SIGSTOP):
        return ""
    shown, deadline = ("dead",) if signum == signal.SIGKILL else ("stopped", "dead"), time.monotonic() + _SEEN_S
    while (state := state_of(pid)) not in shown:
        if time.monotonic() > deadline:
            return None
        time.sleep(0.002)
    seen = f"{state} in the process table"
    if not pause_s:
        return seen
    time.sleep(pause_s)
    try:
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        return f"{seen}, gone before SIGCONT after {pause_s:g} s"
    return f"{seen}, SIGCONT after {pause_s:g} s"
