"""Runs of the `andon` command, and what runs left, for the benchmarks."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from falsify.nemesis.run import environment as environment
from falsify.nemesis.run import steps_of as steps_of
from falsify.nemesis.table import table as table


def command(folder: Path, *arguments: str) -> list[str]:
    """The command line of a training run in `folder`."""
    return [sys.executable, "-m", "andon", "train", "--run-dir", str(folder), *arguments]


@dataclass(frozen=True)
class Run:
    folder: Path
    code: int
    seconds: float
    summary: dict[str, Any]


def run(folder: Path, *arguments: str, expect: Sequence[int] = (0,)) -> Run:
    start = time.perf_counter()
    done = subprocess.run(command(folder, *arguments), env=environment(), capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - start
    if done.returncode not in expect:
        raise RuntimeError(f"exit {done.returncode}: {done.stderr[-2000:]}")
    path = folder / "summary.json"
    return Run(folder, done.returncode, seconds, json.loads(path.read_text()) if path.exists() else {})


def last_object(text: str) -> dict[str, Any]:
    """The last line of `text` that is a JSON object. Raises `ValueError` if there is none."""
    for line in reversed(text.splitlines()):
        with suppress(json.JSONDecodeError):
            found = json.loads(line)
            if isinstance(found, dict):
                return found
    msg = "no figures were printed"
    raise ValueError(msg)
