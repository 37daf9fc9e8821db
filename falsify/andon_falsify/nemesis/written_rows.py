"""The rows that runs under a nemesis train on: a few words each, the same at every call."""

from __future__ import annotations

import json
import random
from pathlib import Path


def write_rows(path: Path, count: int) -> None:
    """`row_lines` of the file's name, as that file."""
    path.write_bytes(b"".join(row_lines(path.name, count)))


def row_lines(name: str, count: int) -> list[bytes]:
    """Rows of a few words each, of three labels in turn; the same at every call, others for another name."""
    draw = random.Random(name)
    words = [f"word{number}" for number in range(40)]
    rows = [
        {"text": " ".join(draw.choices(words, k=draw.randrange(2, 9))), "label": ("north", "south", "west")[number % 3]}
        for number in range(count)
    ]
    return [json.dumps(row).encode() + b"\n" for row in rows]
