"""A file of text as numbered lines, in bounded memory, with every fault of its bytes found."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from pathlib import Path

from andon.problems import InputError, Problem, ProblemList

LONGEST_LINE = 64 * 2**20
"""Bytes of one line that are read at most."""

_WIDE = {codecs.BOM_UTF16_LE: "UTF-16", codecs.BOM_UTF16_BE: "UTF-16"}


def numbered_lines(path: Path, problems: ProblemList) -> Iterator[tuple[int, str]]:
    """(number from 1, text with its line end) of each line of a UTF-8 file; a byte order mark at the start is dropped.

    A line that is not UTF-8 (its first bad byte is named by its offset in the file), that holds a NUL byte or that is
    longer than `LONGEST_LINE` is noted in `problems` and left out. Raises `InputError` where reading cannot go on.
    """
    try:
        with path.open("rb") as file:
            start = file.read(3)
            if start[:2] in _WIDE:
                raise InputError([Problem(str(path), f"is {_WIDE[start[:2]]}; save it as UTF-8")])
            offset = 3 if start == codecs.BOM_UTF8 else 0
            file.seek(offset)
            number = 0
            while line := file.readline(LONGEST_LINE):
                number += 1
                text = _decoded(line, f"{path}:{number}", offset, problems)
                if text is not None:
                    yield number, text
                offset += len(line)
                if len(line) == LONGEST_LINE and not line.endswith(b"\n"):
                    what = f"longer than {LONGEST_LINE} bytes; nothing after it was read"
                    raise InputError([Problem(f"{path}:{number}", what)])
    except OSError as error:
        raise InputError([Problem(str(path), f"cannot be read: {error.strerror or error}")]) from error


def _decoded(line: bytes, where: str, offset: int, problems: ProblemList) -> str | None:
    nul = line.find(0)
    if nul >= 0:
        problems.add(where, f"a NUL byte at byte {offset + nul} of the file; the file must be text in UTF-8")
        return None
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = line[error.start]
        problems.add(where, f"not UTF-8: byte 0x{byte:02x} at byte {offset + error.start} of the file")
        return None
