"""What a run says, on standard error. A stream that takes no more loses its lines; the run goes on without them."""

from __future__ import annotations

import sys
from contextlib import suppress

BROKEN_STREAM = (OSError, ValueError)
"""What writing to a stream raises whose reader has gone, that is full, or that was closed."""


def say(text: str) -> None:
    """Each line of `text` with the command's name in front, in one write: lines of ranks do not come in between."""
    write("".join(f"andon: {line}\n" for line in text.splitlines() or [""]))


def write(text: str) -> None:
    """`text` as it is, at once, to standard error as far as that takes it."""
    with suppress(*BROKEN_STREAM):
        sys.stderr.write(text)
        sys.stderr.flush()
