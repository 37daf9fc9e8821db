"""The processes of this machine, from /proc."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


class Process(NamedTuple):
    """A process when it was listed. started: clock ticks since boot; another process may have the same pid later."""

    pid: int
    parent: int
    started: int
    zombie: bool

    @property
    def command(self) -> str:
        """Its command line, "" if it has ended."""
        return _read(self.pid, "cmdline").decode(errors="backslashreplace").replace("\0", " ").strip()

    @property
    def exists(self) -> bool:
        return any(each.started == self.started for each in _listed([self.pid]))


def descendants(pid: int) -> dict[Process, list[int]]:
    """The descendants of the process `pid`, each with the pids of its ancestors up to `pid`, nearest first."""
    listed, found = {each.pid: each for each in _listed()}, {}
    for each in listed.values():
        above = [each.parent]
        while above[-1] != pid and above[-1] in listed and len(above) < len(listed):
            above.append(listed[above[-1]].parent)
        if above[-1] == pid:
            found[each] = above
    return found


def kill(processes: Collection[Process], wait_s: float) -> None:
    """Kill them, and wait until they are gone, at most `wait_s` seconds."""
    for each in processes:
        with suppress(ProcessLookupError):
            if each.exists:
                os.kill(each.pid, signal.SIGKILL)
    deadline = time.monotonic() + wait_s
    while any(each.exists for each in processes) and time.monotonic() < deadline:
        time.sleep(0.01)


def _listed(pids: Collection[int] = ()) -> list[Process]:
    found = []
    for pid in pids or map(int, filter(str.isdecimal, os.listdir("/proc"))):
        if fields := _read(pid, "stat").rpartition(b")")[2].split():  # the name before it may contain anything
            found.append(Process(pid, int(fields[1]), int(fields[19]), fields[0] in b"ZX"))
    return found


def _read(pid: int, name: str) -> bytes:
    with suppress(OSError):  # the process has ended, or belongs to another user
        return Path(f"/proc/{pid}/{name}").read_bytes()
    return b""
