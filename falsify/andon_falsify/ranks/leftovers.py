"""Processes that ranks left behind: below the ranks, in their sessions, and where the fork server adopted them."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from andon_contracts.liveness.process import Process

_STATE, _PARENT, _SESSION = 0, 1, 3
"""Positions after the command name in `/proc/PID/stat`: fields 3, 4 and 6 of proc(5)."""
_SHOWN = 60
_POLL_S = 0.02


@dataclass(frozen=True)
class Stray:
    """A process that outlived the case that started it. rank: the process of the rank that it is from, 0 if unknown."""

    pid: int
    command: str
    rank: int

    def __str__(self) -> str:
        return f"{self.pid} ({self.command})"


def strays(server: int, ranks: Collection[int]) -> list[Stray]:
    """What runs below the processes `ranks`, in their sessions, or was adopted by the fork server `server`."""
    table = _table()
    ours = {child.pid for child in multiprocessing.active_children()} | set(ranks)
    own_session = table[server][_SESSION] if server in table else None
    found = []
    for pid, (_, parent, _, session) in table.items():
        if pid in ours:
            continue
        above = list(_ancestors(pid, table))
        rank = next((each for each in (session, *above) if each in ranks), 0)
        adopted = parent == server and session != own_session
        if rank or adopted:
            found.append(Stray(pid, _command(pid), rank))
    return found


def settled(server: int, ranks: Collection[int], grace_s: float) -> list[Stray]:
    """The strays that are still there after `grace_s` seconds; none as soon as there are none."""
    deadline = time.monotonic() + grace_s
    while (found := strays(server, ranks)) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return found


def end(found: Collection[Stray], grace_s: float) -> None:
    """Kill each by its pid, and wait until it is gone, `grace_s` seconds at most."""
    held = [process for stray in found if (process := Process.of(stray.pid)) is not None]
    for process in held:
        process.send(signal.SIGKILL)
    deadline = time.monotonic() + grace_s
    while any(process.state() != "gone" for process in held) and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def below(pid: int) -> list[int]:
    """Every process that came of the process `pid` and has it among its ancestors."""
    table = _table()
    return [each for each in table if pid in _ancestors(each, table)]


def parent_of(pid: int) -> int:
    """The process that started `pid`, 0 where that has ended."""
    entry = _entry(pid)
    return entry[_PARENT] if entry is not None else 0


def _table() -> dict[int, tuple[int, int, int, int]]:
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            entry = _entry(int(folder.name))
            if entry is not None:
                found[int(folder.name)] = entry
    return found


def _entry(pid: int) -> tuple[int, int, int, int] | None:
    """State as a character code, parent, process group and session; None for what has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command name stands in brackets and may itself hold blanks and brackets: count from the last one.
    fields = stat[stat.rindex(b")") + 1 :].split()
    if fields[_STATE] in (b"Z", b"X"):
        return None
    return fields[_STATE][0], int(fields[_PARENT]), int(fields[2]), int(fields[_SESSION])


def _ancestors(pid: int, table: Mapping[int, tuple[int, int, int, int]]) -> Iterator[int]:
    while pid in table and (pid := table[pid][_PARENT]):
        yield pid


def _command(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
    except (FileNotFoundError, ProcessLookupError):
        return "ended"
    return words if len(words) <= _SHOWN else f"{words[:_SHOWN]}..."
