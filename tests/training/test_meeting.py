"""Ranks that should not be alone, or whose clocks are apart: told at the start, with numbers."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from andon.backend.group import GroupBackend
from andon.backend.inprocess import InlineBackend
from andon.training.run import clocks_apart
from tests.launch.pipes import PATIENCE_S
from tests.support.ranks import run_ranks
from tests.training.runs import Runs


def _late_clock(seconds: float) -> str:
    if dist.get_rank() == 1:
        true = time.time_ns
        time.time_ns = lambda: true() - int(seconds * 1e9)
    return clocks_apart(GroupBackend("gloo", torch.device("cpu")))


@pytest.mark.parametrize(("seconds", "words"), [(0.0, ""), (20.0, "rank 1's is 20.0 s behind"), (-3600.0, "ahead")])
def test_clocks_that_are_apart_are_told(seconds: float, words: str) -> None:
    """Whose, by how much and which way, on every rank alike; those of one host are not."""
    said = [outcome.get() for outcome in run_ranks(3, _late_clock, seconds)]
    assert len(set(said)) == 1
    assert (words in said[0]) if words else said[0] == ""


def test_one_process_has_one_clock() -> None:
    """Where all ranks are in one process nothing is asked."""
    assert clocks_apart(InlineBackend([torch.device("cpu")] * 2)) == ""


def test_another_number_of_workers_is_told(
    runs: Runs, whole: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """By a run that goes on, whose ledger has another, and by ranks of torchrun, whose configuration has."""
    folder = tmp_path / "run"
    assert runs.train(folder, "training.max_steps=6", backend="threads", workers=2) == 0
    config = tmp_path / "config.yaml"
    config.write_text((folder / "config.yaml").read_text())
    shutil.rmtree(folder)
    capfd.readouterr()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "-m", "andon"]
    command += ["train", str(config), "--backend", "gloo", "--run-dir", str(folder)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "run.workers is 2, torchrun started 1; 1 are missing (--workers 2 refuses that)" in ended.stderr
    refused = subprocess.run(
        [*command, "--workers", "2"], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert "--workers: 2 were asked for, torchrun started 1" in refused.stderr
    assert refused.returncode != 0
