"""Every system call at which a writer may die or be refused: `python -m falsify.nemesis.crash_points`.

Each act on the run folder (saving and pruning checkpoints, appending to the ledger, ...) is first traced. Then
it is done again for every one of its calls that touches the folder: once killed by SIGKILL as it enters the call, once
with the call failing with EIO, and with ENOSPC where a call can. strace's own log must show that it happened there.
After each a process that never saw the writer looks at the folder: the old state or the new one, never neither, nothing
corrupt that is accepted, and the next act works. The control leaves out a protection, and must be found wrong.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import shutil
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import TypeAlias

from .table import table as markdown_table
from .tracing import attached, missing

KILL, EIO, ENOSPC = "SIGKILL", "EIO", "ENOSPC"
_FILLING = ("openat", "write", "pwrite64", "fsync", "fdatasync", "close", "rename", "renameat2", "mkdir", "ftruncate")
"""Calls that a full disk may refuse."""
_CALL = re.compile(r"^(\w+)\(")
_ACT_S = 60.0
"""How long an act may take."""
_READY_S = 60.0
"""How long its preparation may take, and looking at what it left."""
Ended: TypeAlias = "tuple[int, str] | None"


class HangsError(RuntimeError):
    """An act does not end."""


@dataclass(frozen=True)
class Point:
    """The `number`-th call (from 1) named `call` of an act, and what happens there."""

    act: str
    call: str
    number: int
    fault: str

    def __str__(self) -> str:
        return f"{self.act}: {self.fault} at {self.call} {self.number}"


@dataclass(frozen=True)
class Found:
    """What became of a point: how the act ended (None: killed), and everything that is wrong."""

    point: Point
    code: int | None
    wrong: tuple[str, ...]


def points(act: str, base: Path, faults: Sequence[str] = (KILL, EIO, ENOSPC)) -> list[Point]:
    """Every point of an act, from a trace of it; in the order of the calls. Raises `RuntimeError` where it fails."""
    from .disk_acts import ACTS_AND_CONTROL

    folder, log = _place(base), base / "trace"
    ended = _acted(act, folder, ["-o", str(log)])
    if ended is None or ended[0]:
        raise RuntimeError(f"{act} does not end well when nothing is done to it: {ended}")
    found = []
    for call, number in _touching(log.read_text(errors="replace").splitlines(), folder):
        for fault in faults:
            if (fault != KILL or ACTS_AND_CONTROL[act].kills) and (fault != ENOSPC or call in _FILLING):
                found.append(Point(act, call, number, fault))
    return found


def tried(point: Point, base: Path) -> Found:
    """Do the act with the fault at that point, and look at what is left from another process."""
    folder, log = _place(base), base / "trace"
    what = f"signal={KILL}" if point.fault == KILL else f"error={point.fault}"
    selected = ["-e", f"trace={point.call}", "-e", f"inject={point.call}:{what}:when={point.number}"]
    wrong, ended = [], None
    try:
        ended = _acted(point.act, folder, ["-o", str(log), *selected])
    except HangsError as hangs:
        wrong.append(str(hangs))
    code = None if ended is None else ended[0]
    if ended is not None and code == 1:
        wrong.append(f"an error that nobody foresaw: {ended[1]}")
    if not wrong and not _struck(point, log.read_text(errors="replace"), folder, killed=ended is None):
        wrong.append("the fault did not happen there")
    here, there = _context().Pipe()
    with _process("look", point.act, str(folder), code, there):
        there.close()
        try:
            wrong += here.recv() if here.poll(_READY_S) else [f"looking at the folder takes longer than {_READY_S:g} s"]
        except EOFError:
            wrong.append("looking at the folder did not end")
    for each in (folder, folder.with_name(f"{folder.name}-rehearsal")):
        shutil.rmtree(each, ignore_errors=True)
    return Found(point, code, tuple(wrong))


@cache
def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([f"{__package__}.disk_acts"])
    return context


def _started(role: str, *arguments: object) -> multiprocessing.context.ForkServerProcess:
    process = _context().Process(target=_be, args=(role, *arguments), daemon=True)
    process.start()
    return process


def _be(role: str, *arguments: object) -> None:
    """One process of ours: the writer, or the one that looks."""
    from . import disk_acts

    {"play": disk_acts.play, "look": disk_acts.look}[role](*arguments)  # type: ignore[operator]


@contextmanager
def _process(role: str, *arguments: object) -> Iterator[multiprocessing.context.ForkServerProcess]:
    process = _started(role, *arguments)
    try:
        yield process
    finally:
        process.kill()
        process.join()


def _acted(act: str, folder: Path, options: Sequence[str]) -> Ended:
    """Play an act under strace with these options: how it ended, None where it was killed before it could say.

    Raises `HangsError` where it does not end.
    """
    here, there = _context().Pipe()
    with _process("play", act, str(folder), there) as writer:
        there.close()
        if not here.poll(_READY_S) or here.recv_bytes() != b"ready":
            raise RuntimeError(f"{act}: the writer did not get ready")
        with attached(writer.pid or 0, "-s", "0", *options):
            try:
                here.send_bytes(b"go")
                if not here.poll(_ACT_S):
                    raise HangsError(f"the writer hangs: nothing in {_ACT_S:g} s")
                try:
                    code, error = here.recv()
                except (EOFError, ConnectionResetError):
                    return None
                writer.join(_ACT_S)
                if writer.is_alive():
                    raise HangsError("the writer hangs at its end")
                return code, error
            finally:
                writer.kill()


def _touching(lines: Sequence[str], folder: Path) -> Iterator[tuple[str, int]]:
    """Calls of the trace that name the folder or a file in it, each with its number among those of its name."""
    count: Counter[str] = Counter()
    for line in lines:
        found = _CALL.match(line)
        if found:
            count[found[1]] += 1
            if _names(line, folder):
                yield found[1], count[found[1]]


def _names(line: str, folder: Path) -> bool:
    return re.search(re.escape(str(folder)) + r"(?!-rehearsal)", line) is not None


def _struck(point: Point, log: str, folder: Path, *, killed: bool) -> bool:
    """Whether strace's log shows the fault at a call that touches the folder."""
    lines = log.splitlines()
    if point.fault == KILL:
        calls = [line for line in lines if _CALL.match(line)]
        return killed and bool(calls) and _names(calls[-1], folder) and "killed by SIGKILL" in lines[-1]
    return any("(INJECTED)" in line and _names(line, folder) for line in lines)


def _place(base: Path) -> Path:
    return Path(tempfile.mkdtemp(dir=base)) / "folder"


def table(found: Sequence[Found]) -> str:
    """A Markdown table, a row for each act and system call: points tried, by fault, and how many are wrong."""
    rows: dict[tuple[str, str], list[Found]] = defaultdict(list)
    for each in found:
        rows[each.point.act, each.point.call].append(each)
    counted = []
    for (act, call), members in rows.items():
        faults = Counter(each.point.fault for each in members)
        codes = Counter(each.code for each in members)
        cells = (act, call, faults[KILL], faults[EIO], faults[ENOSPC], codes[2] + codes[70], codes[0])
        counted.append((*cells, sum(bool(each.wrong) for each in members)))
    return markdown_table(("act", "call", "killed", "EIO", "ENOSPC", "refused in words", "went on", "wrong"), counted)


def main() -> int:
    """Try every point; 0 if nothing is wrong at any, or if this machine does not allow it, which is said."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--act", action="append", help="part of the name of an act; may be given again; default: all")
    options = parser.parse_args()
    reason = missing()
    if reason is not None:
        print(f"skipped: {reason}")
        return 0
    from .disk_acts import ACTS, CONTROL

    began, found = time.monotonic(), []
    with tempfile.TemporaryDirectory() as base:
        for act in ACTS:
            if not options.act or any(part in act for part in options.act):
                for point in points(act, Path(base)):
                    found.append(tried(point, Path(base)))
                    for each in found[-1].wrong:
                        print(f"WRONG: {point}: {each}", flush=True)
        control = [tried(point, Path(base)) for point in points(CONTROL, Path(base), (KILL,))]
    caught = sum(bool(each.wrong) for each in control)
    print(table(found))
    print(f"control: of {len(control)} points of a writer that uses the final name at once, {caught} are found wrong")
    wrong = sum(bool(each.wrong) for each in found)
    print(f"{len(found)} points tried, {wrong} wrong, {time.monotonic() - began:.0f} s")
    return 0 if found and caught and not wrong else 1


if __name__ == "__main__":
    sys.exit(main())
