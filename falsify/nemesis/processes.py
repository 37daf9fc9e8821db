"""The processes of a run, seen from outside: which belong to it, which are ranks, which still run; signals to them."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from typing import Literal

import psutil
from psutil import Process

_SEEN_S = 5.0
"""How long the process table may take to show the effect of a signal."""


def family(pid: int) -> list[Process]:
    """A process and all its descendants; empty after its end."""
    try:
        top = Process(pid)
        return [top, *top.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def marked(variable: str, value: str) -> list[Process]:
    """The running processes that were started with this environment variable.

    A child inherits the environment, so this finds orphans, and children that began a session of their own.
    """
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # the process has ended, or belongs to another user
            if process.environ().get(variable) == value and alive(process):
                found.append(process)
    return found


def command_line(process: Process) -> str:
    """The arguments of a process, separated by spaces; empty after its end."""
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def ranks(launcher: int) -> list[Process]:
    """The ranks that `andon train` has started, in order: the children of its fork server, the oldest first."""
    found: list[Process] = []
    for process in family(launcher):
        if "forkserver" in command_line(process):
            with suppress(psutil.NoSuchProcess):
                found += process.children()
    return sorted(found, key=lambda rank: (rank.create_time(), rank.pid))


def state_of(process: Process) -> Literal["running", "stopped", "dead"]:
    """The state in the process table. A zombie is dead."""
    try:
        status = process.status() if process.is_running() else psutil.STATUS_DEAD
    except psutil.NoSuchProcess:
        return "dead"
    if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
        return "dead"
    return "stopped" if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP) else "running"


def alive(process: Process) -> bool:
    return state_of(process) != "dead"


def send(process: Process, signum: signal.Signals, *, group: bool = False, pause_s: float = 0.0) -> str | None:
    """Send a signal to a process, or to its group. With `pause_s`, send SIGCONT that many seconds later.

    Returns the state in the process table afterwards; "" for signals other than SIGKILL and SIGSTOP; None if there was
    no such process, or the process table does not show the effect.
    """
    try:
        (os.killpg if group else os.kill)(process.pid, signum)
    except ProcessLookupError:
        return None
    if signum not in (signal.SIGKILL, signal.SIGSTOP):
        return ""
    shown, deadline = ("dead",) if signum == signal.SIGKILL else ("stopped", "dead"), time.monotonic() + _SEEN_S
    while (state := state_of(process)) not in shown:
        if time.monotonic() > deadline:
            return None
        time.sleep(0.002)
    if not pause_s:
        return f"{state} in the process table"
    time.sleep(pause_s)
    gone = ""
    try:
        process.resume()
    except psutil.NoSuchProcess:
        gone = "gone before "
    return f"{state} in the process table, {gone}SIGCONT after {pause_s:g} s"
