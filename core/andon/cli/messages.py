"""What the command line says: on standard error, each line with the command's name in front."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """Each line of `text`, in one write, so that lines of ranks do not come in between."""
    sys.stderr.write("".join(f"andon: {line}\n" for line in text.splitlines() or [""]))
    sys.stderr.flush()
