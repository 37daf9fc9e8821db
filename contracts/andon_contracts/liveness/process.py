"""The state of one process (runs, stopped or gone, read from /proc on the same machine), and how it ended."""

from __future__ import annotations

import functools
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from andon_contracts.fields import Count, Part
from andon_contracts.legible import ERROR_FILE_VARIABLE, text_of

State = Literal["runs", "stopped", "gone", "elsewhere"]  # elsewhere: on another machine, or the system does not say
_Kills = tuple[int | None, int | None]  # kills for memory: in this process's cgroup, on this machine
_PROC, _GROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_STATE, _STARTED, _EXIT_CODE = 0, 19, 49
"""Indices of fields 3, 22 and 52 of /proc/PID/stat (proc(5)), counted after the command's name."""
STOPPED = "stopped (by a signal, a debugger)"
STOPPED_BY = "stopped by a signal (SIGSTOP), or a debugger"
_HINTS = {
    signal.SIGSEGV: "a crash in native code",
    signal.SIGBUS: "a crash in native code, or a full shared-memory file system",
    signal.SIGABRT: "native code called abort()",
}


@dataclass(frozen=True)
class Process(Part):
    """Identifies one process by its pid and start time (ticks since boot), because the system reuses pids.

    machine: identifies a boot and a namespace of process ids. Only `local_state` and `kill` read it; the other methods
    assume this machine. error_file: the path that torch's launcher reads for this process, if any.
    """

    pid: Count
    started: Count
    machine: str = ""
    host: str = ""
    error_file: str = ""

    @classmethod
    def here(cls) -> Process:
        pid, error_file = os.getpid(), os.environ.get(ERROR_FILE_VARIABLE, "")
        return cls(pid, start_time(pid) or 0, _machine(), socket.gethostname(), error_file)

    @classmethod
    def of(cls, pid: int) -> Process | None:
        """The process of this machine that has this pid now, if any."""
        started = start_time(pid)
        return None if started is None else cls(pid, started)

    def local_state(self) -> State:
        return self.state() if self.machine and self.machine == _machine() else "elsewhere"

    def state(self) -> State:
        """Its state now. A zombie is gone."""
        fields = _fields(self.pid)
        if fields is None:
            return "elsewhere"
        if not fields or int(fields[_STARTED]) != self.started or fields[_STATE] in "ZX":
            return "gone"
        return "stopped" if fields[_STATE] in "Tt" else "runs"

    def exit_code(self) -> int | None:
        """Its exit code, a signal as a negative number; None while it runs, and after its parent has reaped it."""
        fields = _fields(self.pid) or []
        if len(fields) <= _EXIT_CODE or int(fields[_STARTED]) != self.started or fields[_STATE] != "Z":
            return None
        status = int(fields[_EXIT_CODE])
        return -(status & 0x7F) if status & 0x7F else status >> 8

    def send(self, signum: int) -> bool:
        """Send a signal to this process, but never to another with its pid. Returns False if it has ended."""
        handle = None
        try:
            with suppress(OSError, AttributeError):  # a kernel before 5.3, too many open files, or no such process
                handle = os.pidfd_open(self.pid)
            # The handle stays bound to one process. Only after it is open, check that this is the right process.
            if self.state() == "gone":
                return False
            if handle is None:
                os.kill(self.pid, signum)
            else:
                signal.pidfd_send_signal(handle, signum)
            return True
        except ProcessLookupError:
            return False
        finally:
            if handle is not None:
                os.close(handle)

    def kill(self) -> bool:
        """Kill it if it runs or is stopped on this machine. Returns True if the signal was sent."""
        with suppress(PermissionError):
            return self.local_state() in ("runs", "stopped") and self.send(signal.SIGKILL)
        return False


class ConditionTimer:
    """Measures how long conditions have held, in seconds in which the observing process itself ran.

    A gap between two updates counts for at most `most_s`. Otherwise an observer that was stopped, or whose machine
    slept, would accuse the others as it wakes.
    """

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self._seconds: dict[int, float] = {}
        self._updated = time.monotonic()

    def update(self, holding: Iterable[int]) -> Mapping[int, float]:
        """For each number in `holding`, the seconds for which it has been in `holding` at every update."""
        now = time.monotonic()
        gap, self._updated = min(now - self._updated, self._most_s), now
        self._seconds = {each: self._seconds.get(each, 0.0) + gap for each in holding}
        return self._seconds


def run_within(seconds: float, function: Callable[[], None]) -> bool:
    """Run `function` in a thread and wait at most `seconds` for it. Returns True if it has finished."""
    thread = threading.Thread(target=function, name="andon-end", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # out of threads: better to wait without a limit than to lose the call
        function()
        return True
    thread.join(seconds)
    return not thread.is_alive()


def start_time(pid: int) -> int | None:
    """The start time of the process, in clock ticks since boot; None if it is gone or a zombie."""
    fields = _fields(pid)
    return int(fields[_STARTED]) if fields and fields[_STATE] not in "ZX" else None


def exit_text(code: int | None) -> str:
    if code is None:
        return "is gone"
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name, hint = signal.Signals(-code).name, _HINTS.get(signal.Signals(-code))
    except ValueError:
        name, hint = f"signal {-code}", None
    if code == -signal.SIGKILL:
        hint = kill_text(_KILLS_BEFORE, (group_kills(), memory_kills()), _memory_limit())
    return f"was killed by {name}" + (f" ({hint})" if hint else "")


def kill_text(before: _Kills, now: _Kills, limit_bytes: int | None) -> str:
    """Explain a SIGKILL by the kills for memory before and now, and by the limit of our memory cgroup."""
    group, machine = (None if a is None or b is None else b - a for a, b in zip(before, now, strict=True))
    if group:
        limit = "" if limit_bytes is None else f", whose limit is {limit_bytes / 2**30:.1f} GiB"
        return f"out of memory: the kernel killed {group} of the processes of its memory cgroup{limit}"
    if group is None and machine:
        return f"out of memory, or killed by hand: the kernel killed {machine} for want of memory on this machine"
    if 0 in (group, machine):
        return "by hand or by another program: the kernel killed nothing for want of memory"
    return "out of memory, or killed by hand"


def memory_kills() -> int | None:
    """The number of processes of this machine that the kernel has killed for memory since boot, if it counts them."""
    return _kills_in(_PROC / "vmstat")


def group_kills() -> int | None:
    """The number of kills for memory in this process's memory cgroup; None in the root group, which has no count."""
    kills = _kills_in(_memory_group() / "memory.events")
    return _kills_in(_memory_group() / "memory.oom_control") if kills is None else kills


def _kills_in(path: Path) -> int | None:
    counts = dict(line.split(maxsplit=1) for line in text_of(path).splitlines() if " " in line)
    return int(counts["oom_kill"]) if "oom_kill" in counts else None


def _memory_group() -> Path:
    paths: dict[str, str] = {}
    for line in text_of(_PROC / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        paths |= dict.fromkeys(controllers.split(","), path)
    mounted = _GROUPS / "memory" if "memory" in paths else _GROUPS
    folder = mounted / paths.get("memory", paths.get("", "/")).lstrip("/")
    return folder if folder.is_dir() else mounted  # in a container the path may lie outside of the mount


def _memory_limit() -> int | None:
    for name in ("memory.max", "memory.limit_in_bytes"):
        with suppress(OSError, ValueError):
            limit = int((_memory_group() / name).read_text())
            return limit if limit < 1 << 60 else None  # version 1 gives a huge number for no limit
    return None


def _fields(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat after the command: empty if the process is gone, None if it cannot be read."""
    try:
        # The command's name is in brackets. It may contain brackets and bytes that are not text.
        stat = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return []
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return fields if len(fields) > _STARTED else None


@functools.cache
def _machine() -> str:
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink(_PROC / 'self/ns/pid')}"
    except OSError:
        return ""


_KILLS_BEFORE = group_kills(), memory_kills()  # when this process began
