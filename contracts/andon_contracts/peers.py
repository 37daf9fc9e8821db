"""Whether the process of another rank lives: read from the system where it runs on the same machine."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from andon_contracts.error_file import VARIABLE

State = Literal["runs", "stopped", "gone", "elsewhere"]
_PROC = Path("/proc")
_STATE, _STARTED, _EXIT_CODE = 0, 19, 49
"""Places of these fields in /proc/PID/stat, counted after the command's name."""
_HINTS = {
    signal.SIGKILL: "out of memory, or killed by hand",
    signal.SIGSEGV: "a crash in native code",
    signal.SIGBUS: "a crash in native code, or a full shared-memory file system",
    signal.SIGABRT: "native code gave up",
}


@dataclass(frozen=True)
class Process:
    """A process of this or another machine. `machine` names a boot and a space of process ids; empty: not known.

    `error_file` is what torch's launcher reads of it, if there is one.
    """

    machine: str
    host: str
    pid: int
    started: int
    error_file: str = ""

    @classmethod
    def here(cls) -> Process:
        """This process."""
        fields = _fields(os.getpid())
        started = int(fields[_STARTED]) if fields else 0
        return cls(_machine(), socket.gethostname(), os.getpid(), started, os.environ.get(VARIABLE, ""))

    def look(self) -> State:
        """What it does now; `elsewhere` where that cannot be seen from here."""
        if not self.machine or self.machine != _machine():
            return "elsewhere"
        fields = _fields(self.pid)
        if fields is None:
            return "elsewhere"
        if not fields or int(fields[_STARTED]) != self.started or fields[_STATE] in "ZX":
            return "gone"
        return "stopped" if fields[_STATE] in "Tt" else "runs"

    def exit_code(self) -> int | None:
        """The code with which it ended, a signal as a negative number; None where nobody has kept it."""
        fields = _fields(self.pid)
        if not fields or int(fields[_STARTED]) != self.started or fields[_STATE] != "Z":
            return None
        status = int(fields[_EXIT_CODE])
        return -(status & 0x7F) if status & 0x7F else status >> 8

    def kill(self) -> bool:
        """End it, whatever it does; whether it was there to be ended. Only on this machine."""
        if self.look() not in ("runs", "stopped"):
            return False
        with contextlib.suppress(ProcessLookupError, PermissionError):
            handle = os.pidfd_open(self.pid)
            try:
                # The handle is of one process: that it still is the right one is asked once more.
                if self.look() in ("runs", "stopped"):
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
                    return True
            finally:
                os.close(handle)
        return False


def ending(code: int | None) -> str:
    """How a process ended, in words."""
    if code is None:
        return "is gone"
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name, hint = signal.Signals(-code).name, _HINTS.get(signal.Signals(-code))
    except ValueError:
        name, hint = f"signal {-code}", None
    return f"was killed by {name}" + (f" ({hint})" if hint else "")


def memory_kills() -> int | None:
    """How many processes the system has ended since it started because memory ran out; None where it does not say."""
    try:
        lines = (_PROC / "vmstat").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)


def _fields(pid: int) -> list[str] | None:
    """What the system says of a process: nothing where it is gone, None where that cannot be read."""
    try:
        found = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        return found if len(found) > _EXIT_CODE else None
    except (FileNotFoundError, ProcessLookupError):
        return []
    except OSError:
        return None


@functools.cache
def _machine() -> str:
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink(_PROC / 'self/ns/pid')}"
    except OSError:
        return ""
