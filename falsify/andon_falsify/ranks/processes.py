"""The processes of this machine, from /proc."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_POLL_S = 0.01


@dataclass(frozen=True)
class Process:
    """A process when it was listed. started: clock ticks since boot; another process may have the same pid later."""

    pid: int
    parent: int
    started: int
    zombie: bool

    @property
    def command(self) -> str:
        """Its command line, "" if it has ended."""
        return " ".join(_read(self.pid, "cmdline").decode(errors="backslashreplace").split("\0")).strip()

    @property
    def runs(self) -> bool:
        now = _process(self.pid)
        return now is not None and now.started == self.started

    def kill(self) -> None:
        if self.runs:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signal.SIGKILL)


def descendants(pid: int) -> dict[Process, tuple[int, ...]]:
    """The descendants of the process `pid`, each with the pids of its ancestors up to `pid`, nearest first."""
    listed = {each.pid: each for each in _all()}
    found = {}
    for each in listed.values():
        above = [each.parent]
        while above[-1] != pid and above[-1] in listed and len(above) < len(listed):
            above.append(listed[above[-1]].parent)
        if above[-1] == pid:
            found[each] = tuple(above)
    return found


def kill(processes: Collection[Process], wait_s: float) -> None:
    """Kill them, and wait until they are gone, at most `wait_s` seconds."""
    for each in processes:
        each.kill()
    deadline = time.monotonic() + wait_s
    while any(each.runs for each in processes) and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _all() -> Iterator[Process]:
    for name in os.listdir("/proc"):
        if name.isdecimal() and (process := _process(int(name))) is not None:
            yield process


def _process(pid: int) -> Process | None:
    fields = _read(pid, "stat").rpartition(b")")[2].split()  # the name before it may contain anything
    return Process(pid, int(fields[1]), int(fields[19]), fields[0] in b"ZX") if fields else None


def _read(pid: int, name: str) -> bytes:
    with suppress(OSError):  # the process has ended, or belongs to another user
        return Path(f"/proc/{pid}/{name}").read_bytes()
    return b""
