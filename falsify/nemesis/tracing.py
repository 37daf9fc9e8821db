"""strace on a process: it kills or refuses single system calls, and its log shows what a power cut would take.

The trainer's files are new or appended to, so a power cut takes the end of a file: the writes after its last fsync.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from .planting import NotStruckError, UnavailableError

CALLS = ("write", "pwrite64", "fsync", "fdatasync", "rename", "unlink", "unlinkat", "rmdir", "mkdir", "openat")
"""The calls that `power_cut` needs in the log."""
_WRITE = re.compile(r"^\d+ +p?write(?:64)?\(\d+<([^>]*)>.*= (\d+)$")
_SYNC = re.compile(r"^\d+ +f(?:data)?sync\(\d+<([^>]*)>\) += 0$")
_RENAME = re.compile(r'^\d+ +rename\("([^"]*)", "([^"]*)"\) += 0$')
_RESUMED = re.compile(r"^(\d+) +<\.\.\. (\w+) resumed>(.*)$")
_UNFINISHED = re.compile(r"^(\d+) +(.*?) *<unfinished \.\.\.>$")
_LAST_LINES_S = 5.0
"""How long strace may take to write its last lines."""


@cache
def missing() -> str | None:
    """Why this machine cannot refuse a system call; None if it can."""
    strace = shutil.which("strace")
    if strace is None:
        return "strace is not installed"
    call = [sys.executable, "-c", "import os; os.getppid()"]
    command = [strace, "-o", os.devnull, "-e", "inject=getppid:error=EIO", *call]
    tried = subprocess.run(command, capture_output=True, text=True, check=False)
    return None if tried.returncode == 0 else f"strace may not trace: {tried.stderr.strip()[-200:]}"


@contextmanager
def attached(pid: int, *options: str) -> Iterator[None]:
    """Trace a process. It must end before the context does.

    strace stops the process once before the body runs, so it misses no call.

    Raises `UnavailableError` without strace, and `RuntimeError` if it cannot attach.
    """
    if (reason := missing()) is not None:
        raise UnavailableError(reason)
    with subprocess.Popen(["strace", "-y", *options, "-p", str(pid)], stderr=subprocess.PIPE, text=True) as strace:
        assert strace.stderr is not None
        answer = strace.stderr.readline()
        if f"{pid} attached" not in answer:
            raise RuntimeError(f"strace does not attach: {answer}")
        try:
            yield
        finally:
            # It ends with the process. Otherwise it is killed, because at SIGTERM it may wait forever for a thread.
            try:
                strace.communicate(timeout=_LAST_LINES_S)
            except subprocess.TimeoutExpired:
                strace.kill()


def _joined(lines: Iterable[str]) -> Iterator[str]:
    """The lines of a log of several threads, with each interrupted call on one line, at its end."""
    begun: dict[str, str] = {}
    for line in lines:
        if unfinished := _UNFINISHED.match(line):
            begun[unfinished[1]] = unfinished[2]
        elif resumed := _RESUMED.match(line):
            yield f"{resumed[1]} {begun.pop(resumed[1], '')}{resumed[3]}"
        else:
            yield line


def power_cut(lines: Sequence[str], folder: Path, *, names: bool) -> str:
    """Take from `folder` what a power cut at the end of the log would have taken, and describe it.

    names: undo renames, too, if their folder was not synced afterwards. Otherwise files without content may remain.
    Raises `NotStruckError` if the log shows neither a write nor an fsync in `folder`: then it proves nothing.
    """
    unsynced: Counter[str] = Counter()
    renamed: list[tuple[str, str]] = []
    within, seen = f"{folder}/", 0
    for line in _joined(lines):
        if found := _WRITE.match(line):
            unsynced[found[1]] += int(found[2])
            seen += found[1].startswith(within)
        elif found := _SYNC.match(line):
            unsynced.pop(found[1], None)
            renamed = [each for each in renamed if str(Path(each[1]).parent) != found[1]]
            seen += found[1].startswith(within)
        elif found := _RENAME.match(line):
            old, new = found[1], found[2]
            for path in [path for path in unsynced if path == old or path.startswith(f"{old}/")]:
                unsynced[new + path.removeprefix(old)] = unsynced.pop(path)
            renamed.append((old, new))
    if not seen:
        raise NotStruckError(f"strace saw nothing that was written to the run: {len(lines)} calls")
    lost = {path: count for path, count in unsynced.items() if path.startswith(within)}
    for path, count in lost.items():
        if Path(path).is_file():
            os.truncate(path, max(0, Path(path).stat().st_size - count))
    undone = 0
    for old, new in reversed([each for each in renamed if each[1].startswith(within)] if names else []):
        if Path(new).exists() and not Path(old).exists():
            Path(new).rename(old)
            undone += 1
    return f"{sum(lost.values())} bytes of {len(lost)} files and {undone} names that were not synced are gone"
