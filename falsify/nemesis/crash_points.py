"""Every system call at which a writer may die or be refused: `python -m falsify.nemesis.crash_points`.

Each act on the run folder (saving and pruning checkpoints, appending to the ledger, ...) is traced first. Then it is
repeated for each of its calls that touches the folder: killed by SIGKILL as it enters the call, with the call failing
with EIO, and with ENOSPC if the call can. strace's own log must show that this happened. After each, a process that
never saw the writer checks the folder: it has the old state or the new one, accepts nothing corrupt, and the next act
works. The control leaves out a protection and must be found wrong.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from . import disk_acts
from .tracing import attached, missing

KILL, EIO, ENOSPC = "SIGKILL", "EIO", "ENOSPC"
_FILLING = ("openat", "write", "pwrite64", "fsync", "fdatasync", "close", "rename", "renameat2", "mkdir", "ftruncate")
"""Calls that a full disk may refuse."""
_CALL = re.compile(r"^(\w+)\(")
_LIMIT_S = 60.0
"""How long each of an act, its preparation and its check may take."""


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
    """The result of a point. code: how the act ended; None: it was killed."""

    point: Point
    code: int | None
    wrong: tuple[str, ...]


def points(act: str, base: Path, faults: Sequence[str] = (KILL, EIO, ENOSPC)) -> list[Point]:
    """Trace an act and return all of its points, in the order of the calls. Raises `RuntimeError` if the act fails."""
    folder, log = Path(tempfile.mkdtemp(dir=base)) / "folder", base / "trace"
    ended = _acted(act, folder, ["-o", str(log)])
    if ended is None or ended[0]:
        raise RuntimeError(f"{act} does not end well when nothing is done to it: {ended}")
    found, count = [], Counter[str]()
    for line in log.read_text(errors="replace").splitlines():
        call = _CALL.match(line)
        if call is None:
            continue
        count[call[1]] += 1
        for fault in faults if str(folder) in line else ():
            if (fault != KILL or disk_acts.ACTS_AND_CONTROL[act].kills) and (fault != ENOSPC or call[1] in _FILLING):
                found.append(Point(act, call[1], count[call[1]], fault))
    return found


def tried(point: Point, base: Path) -> Found:
    """Perform the act with the fault at that point, and check the folder from another process."""
    folder, log = Path(tempfile.mkdtemp(dir=base)) / "folder", base / "trace"
    what = f"signal={KILL}" if point.fault == KILL else f"error={point.fault}"
    selected = ["-e", f"trace={point.call}", "-e", f"inject={point.call}:{what}:when={point.number}"]
    wrong, ended = [], None
    try:
        ended = _acted(point.act, folder, ["-o", str(log), *selected])
    except TimeoutError as hangs:
        wrong.append(str(hangs))
    code = None if ended is None else ended[0]
    if ended is not None and code == disk_acts.CRASHED:
        wrong.append(f"an unforeseen error: {ended[1]}")
    if not wrong and not _struck(point, log.read_text(errors="replace"), folder, killed=ended is None):
        wrong.append("the fault did not happen there")
    with _process(disk_acts.look, point.act, str(folder), code) as (_, answers):
        try:
            late = f"looking at the folder takes longer than {_LIMIT_S:g} s"
            wrong += answers.recv() if answers.poll(_LIMIT_S) else [late]
        except EOFError:
            wrong.append("looking at the folder did not end")
    shutil.rmtree(folder, ignore_errors=True)
    return Found(point, code, tuple(wrong))


@contextmanager
def _process(
    target: Callable[..., None], *arguments: object
) -> Iterator[tuple[multiprocessing.context.ForkServerProcess, Connection]]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([disk_acts.__name__])
    here, there = context.Pipe()
    process = context.Process(target=target, args=(*arguments, there), daemon=True)
    process.start()
    there.close()
    try:
        yield process, here
    finally:
        process.kill()
        process.join()


def _acted(act: str, folder: Path, options: Sequence[str]) -> tuple[int, str] | None:
    """Perform an act under strace with these options. Returns how it ended; None: it was killed.

    Raises `TimeoutError` if it does not end.
    """
    with _process(disk_acts.play, act, str(folder)) as (writer, answers):
        if not answers.poll(_LIMIT_S) or answers.recv_bytes() != b"ready":
            raise RuntimeError(f"{act}: the writer did not get ready")
        with attached(writer.pid or 0, "-s", "0", *options):
            try:
                answers.send_bytes(b"go")
                if not answers.poll(_LIMIT_S):
                    raise TimeoutError(f"the writer hangs: nothing in {_LIMIT_S:g} s")
                try:
                    code, error = answers.recv()
                except (EOFError, ConnectionResetError):
                    return None
                writer.join(_LIMIT_S)
                if writer.is_alive():
                    raise TimeoutError("the writer hangs at its end")
                return code, error
            finally:
                writer.kill()


def _struck(point: Point, log: str, folder: Path, *, killed: bool) -> bool:
    """True if strace's log shows the fault at a call that touches the folder."""
    lines = log.splitlines()
    if point.fault == KILL:
        calls = [line for line in lines if _CALL.match(line)]
        return killed and bool(calls) and str(folder) in calls[-1] and "killed by SIGKILL" in lines[-1]
    return any("(INJECTED)" in line and str(folder) in line for line in lines)


def main() -> int:
    """Try every point. 0 if nothing is wrong, or if this machine does not allow it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--act", action="append", help="part of the name of an act; may be repeated; default: all")
    options = parser.parse_args()
    reason = missing()
    if reason is not None:
        print(f"skipped: {reason}")
        return 0
    began, count, wrong = time.monotonic(), 0, 0
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        for act in disk_acts.ACTS:
            if not options.act or any(part in act for part in options.act):
                found = [tried(point, base) for point in points(act, base)]
                for each in found:
                    for what in each.wrong:
                        print(f"WRONG: {each.point}: {what}")
                faults = ", ".join(f"{n} {fault}" for fault, n in Counter(each.point.fault for each in found).items())
                print(f"{act}: {faults}; {sum(each.code == disk_acts.DONE for each in found)} went on", flush=True)
                count, wrong = count + len(found), wrong + sum(bool(each.wrong) for each in found)
        control = [tried(point, base) for point in points(disk_acts.CONTROL, base, (KILL,))]
    caught = sum(bool(each.wrong) for each in control)
    print(f"control: of {len(control)} points of a writer that uses the final name at once, {caught} are found wrong")
    print(f"{count} points tried, {wrong} wrong, {time.monotonic() - began:.0f} s")
    return 0 if count and caught and not wrong else 1


if __name__ == "__main__":
    sys.exit(main())
