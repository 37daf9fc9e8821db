"""Text from anywhere, as text that every format can hold and every reader can see."""

from __future__ import annotations

import re
import sys

# Not in XML 1.0, or shown as nothing, or able to turn the order of what follows: controls other than tab and newline,
# line and paragraph separators, marks of direction, halves of surrogate pairs, noncharacters.
_HIDDEN = re.compile(
    "[\xad\u180e\U000e0000-\U000e0fff\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb\ufffe\uffff\ud800-\udfff]"
)


def legible(text: str, most: int | None = None) -> str:
    """`text` with `\\x00`, `\\udc80`, `\\u202e` for what is invisible; what goes beyond `most` characters is counted.

    The result can be encoded as UTF-8 and stand in XML 1.0, once escaped.
    """
    kept = text if most is None else text[:most]
    left = len(text) - len(kept)
    return _HIDDEN.sub(_written, kept) + (f" … ({left} more characters)" if left else "")


def legible_line(text: str) -> str:
    """`text` as one line, for where a line says one thing: a line break in it is written out too."""
    return legible(text).replace("\n", "\\n")


def counted(count: int, noun: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{count} {noun}{'s' * (count != 1)}"


def log(*lines: str) -> None:
    """Write lines to standard error at once, in one piece: what is invisible in them is written out."""
    print(legible("\n".join(lines)), file=sys.stderr, flush=True)


_logged: set[str] = set()


def log_once(about: str, line: str) -> None:
    """As `log`, but only the first line about `about` in this process: its words may be others each time."""
    if about not in _logged:
        _logged.add(about)
        log(line)


def _written(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
