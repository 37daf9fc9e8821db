"""Runs of the `andon` command and what they left, for the benchmarks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Run:
    """A run that ended: its summary, exit code, and seconds from the start of the command to its exit."""

    folder: Path
    code: int
    seconds: float
    summary: dict[str, Any]


def command(folder: Path, *arguments: str) -> list[str]:
    """The command line of a training run in `folder`."""
    return [sys.executable, "-m", "andon", "train", "--run-dir", str(folder), *arguments]


def environment() -> dict[str, str]:
    """This process's environment, offline."""
    return {**os.environ, "HF_HUB_OFFLINE": "1"}


def run(folder: Path, *arguments: str, expect: Sequence[int] = (0,)) -> Run:
    """Train in `folder`; raises `RuntimeError` with what the command said if it ended otherwise than expected."""
    start = time.perf_counter()
    done = subprocess.run(command(folder, *arguments), env=environment(), capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - start
    if done.returncode not in expect:
        raise RuntimeError(f"exit {done.returncode}: {done.stderr[-2000:]}")
    path = folder / "summary.json"
    return Run(folder, done.returncode, seconds, json.loads(path.read_text()) if path.exists() else {})


def steps_of(folder: Path) -> int:
    """Updates that the ledger in `folder` holds so far."""
    try:
        return (folder / "ledger.jsonl").read_bytes().count(b'"kind":"step"')
    except FileNotFoundError:
        return 0


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "| " + " | ".join("---" for _ in header) + " |"]
    return "\n".join(lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows])
