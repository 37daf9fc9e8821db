"""What a rank wrote before it ended or was given up: the end of its output, or the place where it stood."""

from __future__ import annotations

import re
from pathlib import Path

_READ = 20_000
_SHOWN = 200
_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>.+)$', re.MULTILINE)
_NOT_THEIRS = ("-packages/", "/lib/python3", "<frozen", "andon_falsify/ranks/", "andon_falsify/loops/", "andon/launch/")


def tail(printed: Path) -> str:
    """`; its last output: ...` with the last line that the rank wrote, or "" if it wrote nothing."""
    lines = [line.strip() for line in _end_of(printed).splitlines() if line.strip()]
    return f"; its last output: {lines[-1][-_SHOWN:]}" if lines else ""


def stack(printed: Path) -> str:
    """`; it stood at train in FILE:LINE`: the innermost frame of the subject's own code, or "" if none was written."""
    for frame in _FRAME.finditer(_end_of(printed)):
        if not any(part in frame["file"] for part in _NOT_THEIRS):
            return f"; it stood at {frame['name']} in {frame['file']}:{frame['line']}"
    return ""


def _end_of(printed: Path) -> str:
    try:
        with printed.open("rb") as file:
            file.seek(max(0, printed.stat().st_size - _READ))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""
