"""The `andon` command as another process: its command line, its environment, how far its run is."""

from __future__ import annotations

import os
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
"""What `falsify.nemesis` is imported from, by whoever starts a process in which something is planted."""


def command(folder: Path, *arguments: str) -> list[str]:
    """The command line of a training run in `folder`."""
    return [sys.executable, "-m", "andon", "train", "--run-dir", str(folder), *arguments]


def environment() -> dict[str, str]:
    """This process's environment, offline, in which this package is found: it is installed nowhere."""
    path = os.pathsep.join([str(CHECKOUT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}


def steps_of(folder: Path) -> int:
    """Updates that the ledger in `folder` holds so far, repeated ones too."""
    try:
        return (folder / "ledger.jsonl").read_bytes().count(b'"kind":"step"')
    except FileNotFoundError:
        return 0
