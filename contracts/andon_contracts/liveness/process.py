"""Whether a process lives, is stopped or is gone: read from the system where it runs on the same machine."""

from __future__ import annotations

import functools
import os
import signal
import socket
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from andon_contracts.error_file import VARIABLE
from andon_contracts.fields import Count, Part

State = Literal["runs", "stopped", "gone", "elsewhere"]
_PROC, _GROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_STATE, _STARTED, _EXIT_CODE = 0, 19, 49
"""Places of fields 3, 22 and 52 of proc(5) in /proc/PID/stat, counted after the command's name."""
STOPPED = "stopped (by a signal, a debugger)"
STOPPED_BY = "stopped by a signal (SIGSTOP), or a debugger"
"""The state in which a process is there and does not run, of a rank and of what ranks are started by."""
_HINTS = {
    signal.SIGSEGV: "a crash in native code",
    signal.SIGBUS: "a crash in native code, or a full shared-memory file system",
    signal.SIGABRT: "native code gave up",
}


@dataclass(frozen=True)
class Process(Part):
    """One process for good: a pid alone may be given to another process, a pid with its start time may not.

    `started` counts clock ticks since boot. `machine` names a boot and a space of process ids; empty: this one, as far
    as `alive`, `stopped` and `send` go. `error_file` is what torch's launcher reads of it, if there is one.
    """

    pid: Count
    started: Count
    machine: str = ""
    host: str = ""
    error_file: str = ""

    @classmethod
    def here(cls) -> Process:
        """This process, as others may be told of it."""
        fields = _fields(os.getpid())
        started = int(fields[_STARTED]) if fields else 0
        return cls(os.getpid(), started, _machine(), socket.gethostname(), os.environ.get(VARIABLE, ""))

    @classmethod
    def of(cls, pid: int) -> Process | None:
        """The process of this machine that has this pid now; None where there is none that runs."""
        started = start_time(pid)
        return None if started is None else cls(pid, started)

    def look(self) -> State:
        """What it does now; `elsewhere` where that cannot be seen from here."""
        return self.state() if self.machine and self.machine == _machine() else "elsewhere"

    def state(self) -> State:
        """As `look`, of a process of this machine; `elsewhere` where the system does not say."""
        fields = _fields(self.pid)
        if fields is None:
            return "elsewhere"
        if not fields or int(fields[_STARTED]) != self.started or fields[_STATE] in "ZX":
            return "gone"
        return "stopped" if fields[_STATE] in "Tt" else "runs"

    def alive(self) -> bool:
        """Whether it, a process of this machine, is still there and not a zombie. A stopped process is alive."""
        return self.state() != "gone"

    def stopped(self) -> bool:
        """Whether it is there, but a signal (SIGSTOP) or a debugger keeps it from running."""
        return self.state() == "stopped"

    def exit_code(self) -> int | None:
        """The code with which it ended, a signal as a negative number; None where nobody has kept it."""
        fields = _fields(self.pid) or []
        if len(fields) <= _EXIT_CODE or int(fields[_STARTED]) != self.started or fields[_STATE] != "Z":
            return None
        status = int(fields[_EXIT_CODE])
        return -(status & 0x7F) if status & 0x7F else status >> 8

    def send(self, signum: int) -> bool:
        """Send a signal to this process of this machine, and to no other; False where it has ended already."""
        return self._signal(signum)

    def _signal(self, signum: int) -> bool:
        if not self.alive():
            return False
        try:
            self._reach(signum)
        except ProcessLookupError:
            return False
        return True

    def _reach(self, signum: int) -> None:
        """Raises `ProcessLookupError` where it has ended meanwhile, by whichever call."""
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            raise
        except (OSError, AttributeError):  # a kernel before 5.3, or no more descriptors
            os.kill(self.pid, signum)
            return
        try:
            # The handle is of one process: that it still is the right one is asked once more.
            if not self.alive():
                raise ProcessLookupError
            signal.pidfd_send_signal(handle, signum)
        finally:
            os.close(handle)

    def kill(self) -> bool:
        """End it, whatever it does; whether it was there to be ended. Nothing on another machine."""
        if self.look() not in ("runs", "stopped"):
            return False
        with suppress(PermissionError):
            return self._signal(signal.SIGKILL)
        return False


class Lasting:
    """For how long things have been so, in seconds in which whoever looks at them ran itself.

    A gap between two looks of more than `most_s` counts as that much: it is the looker's own. Stopped together with
    what it looks at, or on a machine that slept, it must accuse nobody as it wakes.
    """

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self._seconds: dict[int, float] = {}
        self._looked = time.monotonic()

    def look(self, so: Iterable[int]) -> Mapping[int, float]:
        """For how long each of those (by number) that are `so` now has been so at every look since."""
        now = time.monotonic()
        gap, self._looked = min(now - self._looked, self._most_s), now
        self._seconds = {each: self._seconds.get(each, 0.0) + gap for each in so}
        return self._seconds


def start_time(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None where it does not run (gone, or a zombie)."""
    fields = _fields(pid)
    return int(fields[_STARTED]) if fields and fields[_STATE] not in "ZX" else None


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
    if code == -signal.SIGKILL:
        hint = who_kills(_KILLS_BEFORE, (group_kills(), memory_kills()), _memory_limit())
    return f"was killed by {name}" + (f" ({hint})" if hint else "")


def memory_kills() -> int | None:
    """How many processes the system has ended since it started because memory ran out; None where it does not say."""
    try:
        lines = (_PROC / "vmstat").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)


def who_kills(
    before: tuple[int | None, int | None], now: tuple[int | None, int | None], limit_bytes: int | None
) -> str:
    """Who sent a SIGKILL that came between two counts of kills for want of memory, (of our cgroup, of the machine).

    limit_bytes: of the cgroup's memory; None: it has none.
    """
    group, machine = (None if a is None or b is None else b - a for a, b in zip(before, now, strict=True))
    if group:
        limit = "" if limit_bytes is None else f", whose limit is {limit_bytes / 2**30:.1f} GiB"
        return f"out of memory: the kernel killed {group} of the processes of its memory cgroup{limit}"
    if group is None and machine:
        return f"out of memory, or killed by hand: the kernel killed {machine} for want of memory on this machine"
    if 0 in (group, machine):
        return "by hand or by another program: the kernel killed nothing for want of memory"
    return "out of memory, or killed by hand"


def group_kills() -> int | None:
    """How many processes of this one's memory cgroup the kernel has ended for want of memory; None where it does not
    say, as of the root."""
    folder = _memory_group()
    for name in ("memory.events", "memory.oom_control"):
        with suppress(OSError, ValueError):
            lines = dict(line.split(maxsplit=1) for line in (folder / name).read_text().splitlines())
            if "oom_kill" in lines:
                return int(lines["oom_kill"])
    return None


def _memory_group() -> Path:
    """The folder of this process's memory cgroup, of version 1 where that has the memory, else 2.

    In a container the path that the kernel tells may be another one's: what is mounted is then the container's own.
    """
    told: dict[str, str] = {}
    with suppress(OSError):
        for line in (_PROC / "self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            told |= dict.fromkeys(controllers.split(","), path)
    mounted = _GROUPS / "memory" if "memory" in told else _GROUPS
    folder = mounted / told.get("memory", told.get("", "/")).lstrip("/")
    return folder if folder.is_dir() else mounted


def _memory_limit() -> int | None:
    for name in ("memory.max", "memory.limit_in_bytes"):
        with suppress(OSError, ValueError):
            found = int((_memory_group() / name).read_text())
            return found if found < 1 << 60 else None  # version 1 says a huge number for none
    return None


def _fields(pid: int) -> list[str] | None:
    """What the system says of a process: nothing where it is gone, None where that cannot be read."""
    try:
        # The command's name stands in brackets, may hold brackets itself, and need not be text.
        stat = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return []
    except OSError:
        return None
    found = stat.rpartition(")")[2].split()
    return found if len(found) > _STARTED else None


@functools.cache
def _machine() -> str:
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink(_PROC / 'self/ns/pid')}"
    except OSError:
        return ""


_KILLS_BEFORE = group_kills(), memory_kills()
"""As this process began: what is counted from then on was killed while it ran."""
