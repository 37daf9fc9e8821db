"""Texts from standard input, one a line, with all that is wrong in them said at once."""

from __future__ import annotations

from collections.abc import Iterable

from andon.data.labels import text_fault
from andon.problems import ProblemList


def read_texts(lines: Iterable[bytes]) -> list[str]:
    """The texts in `lines`, without their line ends.

    Raises `InputError` with each fault at stdin:LINE: not UTF-8, empty, a NUL character; and for no texts at all.
    """
    found = ProblemList()
    texts: list[str] = []
    for number, line in enumerate(lines, start=1):
        where = f"stdin:{number}"
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            found.add(where, f"is not UTF-8: byte 0x{line[error.start]:02x} at column {error.start + 1}")
            continue
        fault = text_fault(text)
        if fault is not None:
            found.add(where, f"the text {fault}")
        texts.append(text)
    if not texts and not found:
        found.add("stdin", "holds no texts; write one a line")
    found.raise_if_any()
    return texts
