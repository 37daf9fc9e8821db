"""`andon plan` as a user runs it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command import cli, tree
from tests.training.runs import SMALL, write_jsonl

SETS = [part for each in SMALL for part in ("--set", each)]


def test_a_plan_in_words_and_as_json(tmp_path: Path) -> None:
    """Fits: 0 and JSON in bytes. Does not fit: 2, and which settings need less. Nothing is written anywhere."""
    config = tmp_path / "config.yaml"
    config.write_text(f"data: {{train: {write_jsonl(tmp_path / 'rows.jsonl')}}}\n", encoding="utf-8")
    before = tree(tmp_path)
    ended = cli("plan", config, *SETS, "--workers", "1,3", "--json", folder=tmp_path)
    assert ended.code == 0, ended.said
    found = json.loads("\n".join(ended.out))
    assert [world["workers"] for world in found["worlds"]] == [1, 3]
    each = found["worlds"][0]["devices"][0]["each_rank"]
    assert each["moments"] == 2 * each["weights"] > 0

    ended = cli("plan", config, *SETS, "--set", "run.backend=nccl", "--gpu-memory", "0.5", folder=tmp_path)
    assert ended.code == 2, ended.said
    assert any("DOES NOT FIT in the 0.50 GiB" in line for line in ended.out)
    assert "settings that need less:" in ended.out
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    ("command", "module", "function"),
    [("plan", "andon.training.forecast", "forecast"), ("check", "andon.training.preview", "describe")],
)
def test_a_plan_that_the_kernel_kills_says_so(tmp_path: Path, command: str, module: str, function: str) -> None:
    """Out of memory it was gone without a word. 71 as for a rank, with the signal and what the kernel says of it."""
    program = f"""
import os, signal, sys, types
found = types.ModuleType({module!r})
found.{function} = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
found.machine_here = lambda *_: None
sys.modules[{module!r}] = found
from andon.cli.app import main
main()
"""
    done = subprocess.run([sys.executable, "-c", program, command], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (71, "")
    assert re.fullmatch(rf"andon: {command} was killed by SIGKILL \(.+\)\n", done.stderr)


def test_numbers_that_are_none_are_refused(tmp_path: Path) -> None:
    """One line that has the value in it, and 2."""
    config = tmp_path / "config.yaml"
    config.write_text("seed: 1\n", encoding="utf-8")
    for flags in (("--workers", "2,x"), ("--workers", "0"), ("--workers", "000019999"), ("--gpu-memory", "-1")):
        ended = cli("plan", config, *flags)
        assert (ended.code, ended.out, len(ended.said)) == (2, [], 1)
        assert flags[1] in ended.said[0]
