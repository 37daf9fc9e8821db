"""Escapes text of unknown origin for every format, and reports to standard error and to torch's launcher."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
from pathlib import Path

# Not in XML 1.0, or invisible, or able to reorder the text after it: controls other than tab and newline, line and
# paragraph separators, marks of direction, halves of surrogate pairs, noncharacters.
_HIDDEN = re.compile(
    "[\xad\u180e\U000e0000-\U000e0fff\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb\ufffe\uffff\ud800-\udfff]"
)
ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
_LATE_S = 5
_logged: set[str] = set()


def legible(text: str, most: int | None = None) -> str:
    """Escape invisible characters of `text` as `\\x00`, `\\udc80`, `\\u202e`. The rest after `most` is cut and counted.

    The result can be encoded as UTF-8 and stand in XML 1.0, once escaped.
    """
    shown = text if most is None else text[:most]
    left = len(text) - len(shown)
    return _HIDDEN.sub(_escaped, shown) + (f" … ({left} more characters)" if left else "")


def _escaped(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def legible_line(text: str) -> str:
    return legible(text).replace("\n", "\\n")


def text_of(path: Path) -> str:
    """The contents of `path` (a /proc file), or "" if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def counted(count: int, noun: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{count} {noun}{'s' * (count != 1)}"


def log(*lines: str) -> None:
    """Write lines to standard error in one write, their last newline included, with invisible characters escaped."""
    print(legible("\n".join(lines)) + "\n", end="", file=sys.stderr, flush=True)


def log_once(topic: str, line: str) -> None:
    """Log `line` unless this process has logged a line on `topic` before."""
    if topic not in _logged:
        _logged.add(topic)
        log(line)


def report_to_launcher(message: str, *, late: bool, path: str | None = None) -> None:
    """Write torch's error file at `path`, or at the path that torch's launcher set for this process, if it did.

    The launcher prints the earliest failure, in whole seconds, as the root cause. late: another rank is the cause. The
    file then replaces an earlier one of this process and gets a later time, so that it does not look like the cause.
    """
    path = path or os.environ.get(ERROR_FILE_VARIABLE)
    if path and (late or not Path(path).exists()):
        with contextlib.suppress(OSError):
            write_error_file(Path(path), message, message, int(time.time()) + _LATE_S * late)


def write_error_file(path: Path, message: str, stack: str, when: int, **more: object) -> None:
    """Write torch's error file, whole or not at all: a torn one stops torchrun.

    stack: torch prints it unescaped. when: seconds since the epoch, by which torch orders failures. Raises `OSError`.
    """
    body = {"message": legible(message), **more, "extraInfo": {"py_callstack": legible(stack), "timestamp": str(when)}}
    part = Path(f"{path}.{os.getpid()}.{time.monotonic_ns()}")
    part.write_text(json.dumps({"message": body}), encoding="utf-8")
    part.replace(path)
