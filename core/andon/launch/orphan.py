"""A rank never outlives its agent.

Torch's launcher gives each subprocess worker a session of its own, and a forkserver's children have the forkserver as
parent, so neither a signal to the launcher's group nor the death of the direct parent can be relied on alone. A rank
therefore asks the kernel for a death signal *and* looks for its agent five times a second.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from dataclasses import dataclass
from pathlib import Path

POLL_S = 0.2
"""Seconds between two looks at the agent; the bound on an orphan's life is this plus one scheduling delay."""

_PR_SET_PDEATHSIG = 1
_STATE, _STARTED = 0, 19
"""Positions after the command name in `/proc/PID/stat`: fields 3 and 22 of proc(5)."""


@dataclass(frozen=True)
class Process:
    """One process for good: a pid alone may be given to another process, a pid with its start time may not."""

    pid: int
    started: int
    """Clock ticks between boot and the start of the process (`/proc/PID/stat`, field 22)."""

    @classmethod
    def of(cls, pid: int) -> Process | None:
        """The process that has this pid now; None where there is none that runs."""
        started = start_time(pid)
        return None if started is None else cls(pid, started)

    def alive(self) -> bool:
        """Whether it is still there and not a zombie. A stopped process is alive."""
        return start_time(self.pid) == self.started

    def stopped(self) -> bool:
        """Whether it is there, but a signal (SIGSTOP) or a debugger keeps it from running."""
        fields = _stat(self.pid)
        return fields is not None and int(fields[_STARTED]) == self.started and fields[_STATE] in (b"T", b"t")

    def send(self, signum: int) -> bool:
        """Send a signal; False where the process has ended already."""
        if not self.alive():
            return False
        try:
            os.kill(self.pid, signum)
        except ProcessLookupError:
            return False
        return True


def start_time(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None where it does not run (gone, or a zombie)."""
    fields = _stat(pid)
    return None if fields is None or fields[_STATE] in (b"Z", b"X") else int(fields[_STARTED])


def _stat(pid: int) -> list[bytes] | None:
    """The fields of proc(5) after the command name; None where there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command name stands in brackets and may itself hold blanks and brackets: count from the last one.
    return stat[stat.rindex(b")") + 1 :].split()


def die_with_parent(agent_pid: int, *, poll_s: float = POLL_S) -> None:
    """End this process by SIGKILL as soon as its direct parent or its agent is gone.

    The kernel's death signal covers the direct parent (the agent under torchrun, the forkserver under `launch`); a
    daemon thread covers the agent, every `poll_s` seconds. An agent that is gone already ends this process at once.
    """
    if agent_pid < 1:
        raise ValueError(f"agent_pid must be a process id, not {agent_pid}")
    _ask_for_death_signal()
    agent = Process.of(agent_pid)
    if agent is None:
        _end_now()
    else:
        threading.Thread(target=_watch, args=(agent, poll_s), name="orphan-guard", daemon=True).start()


def bind_to_parent(parent_pid: int) -> None:
    """Have the kernel end this process by SIGKILL when its parent ends; at once where that has happened already."""
    _ask_for_death_signal()
    if os.getppid() != parent_pid:
        _end_now()


def _ask_for_death_signal() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_PDEATHSIG): {os.strerror(number)}")


def _watch(agent: Process, poll_s: float) -> None:
    never = threading.Event()
    while agent.alive():
        never.wait(poll_s)
    _end_now()


def _end_now() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
