"""The holdings of a run that trains, at one moment: memory, files, sockets, threads, processes, disk."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from andon.run.atomic import is_leftover
from falsify.nemesis.processes import command_line, session

SHARED_MEMORY = Path("/dev/shm")
_LOGS = ("ledger.jsonl", "metrics.jsonl")
"""They grow by a line a step: that is what they are for."""
_TAIL = 1 << 20
_PAGE_KIB = os.sysconf("SC_PAGE_SIZE") // 1024


@dataclass(frozen=True)
class Held:
    """The holdings of one process. `role`: launcher, fork server, agent, rank 0 to n, or other."""

    pid: int
    role: str
    memory_kib: int
    files: int
    sockets: int
    threads: int


@dataclass(frozen=True)
class Sample:
    """One look at a run of which all workers train.

    `at_s`: seconds since the soak began. `generation` counts all that were seen, over all launches. `matched`: the
    first look at this generation, at the same age of it as in every other. `age`: lines of the ledger since the
    generation was first seen. `step`: of the last update. `world`: number of workers. `disk_kib` and `entries`: of the
    run folder, its two logs left out; `leftovers`, `temporary`, `shared`: temporary files in it, in the temporary
    folder, in shared memory.
    """

    at_s: float
    generation: int
    matched: bool
    age: int
    step: int
    world: int
    held: tuple[Held, ...]
    disk_kib: float
    entries: int
    leftovers: int
    temporary: int
    shared: int


@dataclass
class Sampler:
    """Looks at one run folder, launch after launch. `temporary` is the run's own folder for temporary files."""

    folder: Path
    temporary: Path
    began: float = field(default_factory=time.monotonic)
    generations: int = 0
    _known: tuple[int, int] = (0, 0)
    _from: int = 0
    _matched: int = 0
    _shared: set[str] = field(default_factory=set)
    _before: frozenset[str] = field(default_factory=lambda: frozenset(_names(SHARED_MEMORY)))

    def lines_of_generation(self, launcher: int) -> int:
        """Lines in the ledger since this generation of workers was first seen; 0 where none is there."""
        found = _agents(self.folder)
        if not found:
            return 0
        last = last_line(self.folder)
        if (launcher, found["generation"]) != self._known:
            self._known, self._from = (launcher, found["generation"]), last["seq"]
            self.generations += 1
        return int(last["seq"]) - self._from

    def look(self, launcher: int) -> Sample | None:
        """The holdings now; None where a process went while it was looked at."""
        found, step = _agents(self.folder), last_line(self.folder).get("step", 0)
        roles = {launcher: "launcher"} | {each["agent"]: "agent" for each in found.get("agents", [])}
        roles |= {each["worker"]: f"rank {each['rank']}" for each in found.get("agents", [])}
        members = session(launcher)
        held = tuple(one for pid in members if (one := _held(pid, roles)) is not None)
        if not found or {one.pid for one in held} != set(members) or not roles.keys() <= set(members):
            return None
        self._note_shared(members)
        entries = [path for path in _below(self.folder) if path.name not in _LOGS]
        matched, self._matched = self._matched != self.generations, self.generations
        return Sample(
            at_s=round(time.monotonic() - self.began, 2),
            generation=self.generations,
            matched=matched,
            age=self.lines_of_generation(launcher),
            step=step,
            world=len(found["agents"]),
            held=held,
            disk_kib=sum(map(_size, entries)) / 1024,
            entries=len(entries),
            leftovers=sum(is_leftover(path.name) for path in entries),
            temporary=len(_names(self.temporary)),
            shared=self.shared(),
        )

    def shared(self) -> int:
        """Entries of shared memory that are there and were seen in use by the run, or bear a pid of it."""
        return len(self._shared & set(_names(SHARED_MEMORY)))

    def _note_shared(self, members: list[int]) -> None:
        new = set(_names(SHARED_MEMORY)) - self._before - self._shared
        if new:
            used = {name for pid in members for name in _mapped(pid)}
            pids = {str(pid) for pid in members}
            self._shared |= {name for name in new if name in used or pids & set(name.replace(".", "_").split("_"))}


def last_line(folder: Path) -> dict[str, Any]:
    """Number (`seq`) and step of the last whole line of the ledger; zeros where there is none."""
    try:
        with (folder / "ledger.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
            lines = file.read().rpartition(b"\n")[0].splitlines()
    except FileNotFoundError:
        lines = []
    return json.loads(lines[-1]) if lines else {"seq": 0, "step": 0}


def _agents(folder: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((folder / "reports" / "agents.json").read_text())
    except FileNotFoundError:
        return {}
    return found


def _held(pid: int, roles: dict[int, str]) -> Held | None:
    """None where the process went meanwhile."""
    try:
        role = roles.get(pid) or ("fork server" if b"forkserver" in command_line(pid) else "other")
        memory = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_KIB
        links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
        threads = len(list(Path(f"/proc/{pid}/task").iterdir()))
    except (FileNotFoundError, ProcessLookupError):
        return None
    return Held(pid, role, memory, len(links), sum(link.startswith("socket:") for link in links), threads)


def _mapped(pid: int) -> set[str]:
    """Names in shared memory that a process has mapped or open."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        places = [line.partition("/")[2] for line in lines if "/dev/shm/" in line]
        places += [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
    except (FileNotFoundError, ProcessLookupError):
        return set()
    return {place.rpartition("/")[2].split(" ")[0] for place in places if "dev/shm/" in place}


def _names(folder: Path) -> list[str]:
    return [entry.name for entry in folder.iterdir()] if folder.is_dir() else []


def _below(folder: Path) -> list[Path]:
    """All files and folders in it; a folder that goes meanwhile has nothing in it."""
    return [Path(at) / name for at, folders, files in os.walk(folder) for name in (*folders, *files)]


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size if path.is_file() else 0
    except FileNotFoundError:
        return 0
