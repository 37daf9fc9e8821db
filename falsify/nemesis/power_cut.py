"""What a power cut leaves: the writes of a process as strace saw them, less those that came after the last fsync.

The trainer's files are new or appended to, so what is lost of one is its end. `names`: whether names that were given
after the last fsync of their folder are lost too; where they are kept, a file may be there that has nothing in it.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

CALLS = ("write", "pwrite64", "fsync", "fdatasync", "rename", "unlink", "unlinkat", "rmdir", "mkdir", "openat")
_WRITE = re.compile(r"^\d+ +p?write(?:64)?\(\d+<([^>]*)>.*= (\d+)$")
_SYNC = re.compile(r"^\d+ +f(?:data)?sync\(\d+<([^>]*)>\) += 0$")
_RENAME = re.compile(r'^\d+ +rename\("([^"]*)", "([^"]*)"\) += 0$')
_RESUMED = re.compile(r"^(\d+) +<\.\.\. (\w+) resumed>(.*)$")
_UNFINISHED = re.compile(r"^(\d+) +(.*?) *<unfinished \.\.\.>$")


def joined(lines: Iterable[str]) -> list[str]:
    """The lines of a log of several threads, each call on one line where it ended."""
    begun: dict[str, str] = {}
    whole = []
    for line in lines:
        if unfinished := _UNFINISHED.match(line):
            begun[unfinished[1]] = unfinished[2]
        elif resumed := _RESUMED.match(line):
            whole.append(f"{resumed[1]} {begun.pop(resumed[1], '')}{resumed[3]}")
        else:
            whole.append(line)
    return whole


def unsynced(lines: Iterable[str], folder: Path) -> tuple[Counter[str], list[tuple[str, str]]]:
    """By the log: bytes of each file in `folder` that were not synced at the end, and renames whose folder was not."""
    lost: Counter[str] = Counter()
    renamed: list[tuple[str, str]] = []
    for line in joined(lines):
        if found := _WRITE.match(line):
            lost[found[1]] += int(found[2])
        elif found := _SYNC.match(line):
            lost.pop(found[1], None)
            renamed = [each for each in renamed if str(Path(each[1]).parent) != found[1]]
        elif found := _RENAME.match(line):
            old, new = found[1], found[2]
            for path in [path for path in lost if path == old or path.startswith(f"{old}/")]:
                lost[new + path.removeprefix(old)] = lost.pop(path)
            renamed.append((old, new))
    inside = Counter({path: count for path, count in lost.items() if path.startswith(f"{folder}/")})
    return inside, [each for each in renamed if each[1].startswith(f"{folder}/")]


def synced_or_lost(lines: Iterable[str], folder: Path) -> int:
    """How many calls of the log wrote to a file in `folder`, or synced one: a log without any is no proof of a cut."""
    found = (_WRITE.match(line) or _SYNC.match(line) for line in joined(lines))
    return sum(each is not None and each[1].startswith(f"{folder}/") for each in found)


def cut(lines: Iterable[str], folder: Path, *, names: bool) -> str:
    """Take from `folder` what a power cut at the end of the log would have taken; what was, in words."""
    lost, renamed = unsynced(lines, folder)
    for path, count in lost.items():
        if Path(path).is_file():
            os.truncate(path, max(0, Path(path).stat().st_size - count))
    undone = 0
    for old, new in reversed(renamed if names else []):
        if Path(new).exists() and not Path(old).exists():
            Path(new).rename(old)
            undone += 1
    return f"{sum(lost.values())} bytes of {len(lost)} files and {undone} names that were not synced are gone"
