"""What is seen while a run trains, where a machine reads it or nobody does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from andon.run.folder import RunFolder
from tests.launch.pipes import PATIENCE_S
from tests.training.runs import Runs


def _command(runs: Runs, folder: Path, *words: str, more: tuple[str, ...]) -> list[str]:
    overrides = [part for each in runs.overrides(*more) for part in ("--set", each)]
    return [sys.executable, "-m", "andon", "train", "--run-dir", str(folder), *words, *overrides]


def test_a_machine_is_told_the_metrics_and_the_end(runs: Runs, tmp_path: Path) -> None:
    """Standard output is JSON, a line each, from ranks of their own: every second update and the last, all scores, as
    the run's own file has them; then how it ended, and where."""
    folder = tmp_path / "run"
    words = ("--json", "--backend", "gloo", "--workers", "2")
    command = _command(runs, folder, *words, more=("training.max_steps=7", "run.log_every=2"))
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert ended.returncode == 0, ended.stderr
    told = [json.loads(line) for line in ended.stdout.splitlines()]
    written = [json.loads(line) for line in RunFolder(folder).metrics.read_text().splitlines()]
    assert told[-1] == {"what": "end", "exit": 0, "run": str(folder)}
    assert told[:-1] == [line for line in written if "what" in line or line["step"] in (2, 4, 6, 7)]
    assert {"what" in line for line in told[:-1]} == {True, False}
    assert "steps/s" not in ended.stderr


@pytest.mark.parametrize(("flag", "lines"), [("--quiet", 0), ("--json", 1)])
def test_a_quiet_run_says_no_progress(runs: Runs, tmp_path: Path, flag: str, lines: int) -> None:
    """No update and no score on a line; how it began and ended stays."""
    more = ("training.max_steps=3", "run.log_every=1")
    command = _command(runs, tmp_path / "run", flag, "--backend", "inline", more=more)
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert ended.returncode == 0, ended.stderr
    assert sum(line.startswith('{"step"') for line in ended.stdout.splitlines()) >= 3 * lines
    assert bool(ended.stdout) == bool(lines)
    assert "steps/s" not in ended.stderr
    assert "accuracy" not in "".join(line for line in ended.stderr.splitlines() if not line.startswith("andon: "))
    assert "andon: done: 3 steps" in ended.stderr


def test_no_progress_and_progress_as_json_are_not_both(tmp_path: Path) -> None:
    """A line that says which two, and exit 2."""
    command = [sys.executable, "-m", "andon", "train", "--quiet", "--json", "--run-dir", str(tmp_path / "run")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert ended.returncode == 2
    assert "--quiet: says nothing, and --json" in ended.stderr
    assert not (tmp_path / "run").exists()
