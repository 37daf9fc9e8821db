"""The processes of a run, from outside: who belongs to it, who is a rank, who is still there; signals to them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from andon_contracts.liveness.process import Process

_STOPPED, _DEAD = ("T", "t"), ("", "Z", "X")
"""What the process table says of a process that is stopped, and of one that is killed."""
_SEEN_S = 5.0
"""How long a signal may take to show in `/proc`."""


def children(pid: int) -> list[int]:
    """The children of all threads of a process; none where it is gone."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def family(pid: int) -> list[int]:
    """A process and all that descend from it."""
    return [pid] + [member for child in children(pid) for member in family(child)]


def session(leader: int) -> list[int]:
    """The processes of the session that `leader` began, orphans included, zombies not."""
    found = []
    for entry in Path("/proc").iterdir():
        fields = _stat(int(entry.name)) if entry.name.isdecimal() else []
        if fields and fields[0] != "Z" and int(fields[3]) == leader:
            found.append(int(entry.name))
    return found


def marked(variable: str, value: str) -> list[int]:
    """The processes that were started with this value of a variable, in whatever session, zombies not.

    A process that starts others hands its environment on, so this finds those that began a session of their own.
    """
    wanted = os.fsencode(f"{variable}={value}")
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and wanted in _variables(int(entry.name)) and alive(int(entry.name)):
            found.append(int(entry.name))
    return found


def _variables(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it is gone, or another user's
        return []


def state_of(pid: int) -> str:
    """The letter of a process's state in `/proc/PID/stat` (T: stopped, Z: zombie); empty where it is gone."""
    return (_stat(pid) or [""])[0]


def _stat(pid: int) -> list[str]:
    """The fields of proc(5) after the command name; none where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def ranks(members: Iterable[int]) -> list[int]:
    """Ranks are the children of the launcher's forkserver."""
    return [child for pid in members if b"forkserver" in command_line(pid) for child in children(pid)]


def identified(pids: Iterable[int]) -> list[Process]:
    """Those of these processes that run, each told from a later one of the same id by when it began."""
    return [process for process in map(Process.of, pids) if process is not None]


def alive(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    return state_of(pid) not in ("", "Z")


def wait_until_gone(pids: Iterable[int], limit_s: float = 60.0) -> float:
    """Seconds until none of those that have these ids now is left.

    Raises `RuntimeError` with those that are after `limit_s`.
    """
    start = time.perf_counter()
    found = identified(pids)
    while left := [each for each in found if each.state() != "gone"]:
        if time.perf_counter() - start > limit_s:
            raise RuntimeError(f"processes outlive the run: {[each.pid for each in left]}")
        time.sleep(0.01)
    return time.perf_counter() - start


def command_line(pid: int) -> bytes:
    """What a process was started with; empty where it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def processes_of(victim: str, launcher: int) -> list[int]:
    """The launcher, or the ranks that it has started, in order."""
    return [launcher] if victim == "launcher" else ranks(family(launcher))


def send(pid: int, signum: signal.Signals, *, group: bool = False, pause_s: float = 0.0) -> str | None:
    """Send a signal to a process, or to its group, and SIGCONT `pause_s` seconds later; 0: never.

    What the process table then shows, in words, "" for a signal that does not show there; None where there was no such
    process, or the table does not show it.
    """
    try:
        (os.killpg if group else os.kill)(pid, signum)
    except ProcessLookupError:
        return None
    if signum not in (signal.SIGKILL, signal.SIGSTOP):
        return ""
    state = _shown(pid, _DEAD if signum == signal.SIGKILL else (*_STOPPED, *_DEAD))
    if state is None:
        return None
    seen = f"{'stopped' if state in _STOPPED else 'dead'} in the process table"
    return seen + (_continued(pid, pause_s) if pause_s else "")


def _continued(pid: int, pause_s: float) -> str:
    time.sleep(pause_s)
    try:
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        return f", gone before SIGCONT after {pause_s:g} s"
    return f", SIGCONT after {pause_s:g} s"


def _shown(pid: int, states: Sequence[str]) -> str | None:
    """The state, once it is one of these; None where it is not in time."""
    deadline = time.monotonic() + _SEEN_S
    while time.monotonic() < deadline:
        if (state := state_of(pid)) in states:
            return state
        time.sleep(0.002)
    return None
