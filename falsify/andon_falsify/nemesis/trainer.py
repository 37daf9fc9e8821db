"""The `andon` command as another process: its command line, its environment, how far its run is."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def command(folder: Path, *arguments: str) -> list[str]:
    """The command line of a training run in `folder`."""
    return [sys.executable, "-m", "andon", "train", "--run-dir", str(folder), *arguments]


def environment() -> dict[str, str]:
    """This process's environment, offline."""
    return {**os.environ, "HF_HUB_OFFLINE": "1"}


def steps_of(folder: Path) -> int:
    """Updates that the ledger in `folder` holds so far, repeated ones too."""
    try:
        return (folder / "ledger.jsonl").read_bytes().count(b'"kind":"step"')
    except FileNotFoundError:
        return 0
