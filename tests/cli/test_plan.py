"""`andon plan` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.command import andon, tree
from tests.training.runs import SMALL, write_jsonl

SETS = [part for each in SMALL for part in ("--set", each)]


def test_a_plan_in_words_and_as_json(tmp_path: Path) -> None:
    """Fits: 0 and JSON in bytes. Does not fit: 2, and which settings need less. Nothing is written anywhere."""
    config = tmp_path / "config.yaml"
    config.write_text(f"data: {{train: {write_jsonl(tmp_path / 'rows.jsonl')}}}\n", encoding="utf-8")
    before = tree(tmp_path)
    ended = andon("plan", config, *SETS, "--workers", "1,3", "--json", folder=tmp_path)
    assert ended.code == 0, ended.said
    found = json.loads("\n".join(ended.out))
    assert [world["workers"] for world in found["worlds"]] == [1, 3]
    each = found["worlds"][0]["devices"][0]["each_rank"]
    assert each["moments"] == 2 * each["weights"] > 0

    ended = andon("plan", config, *SETS, "--set", "run.backend=nccl", "--gpu-memory", "0.5", folder=tmp_path)
    assert ended.code == 2, ended.said
    assert any("DOES NOT FIT in the 0.50 GiB" in line for line in ended.out)
    assert "settings that need less:" in ended.out
    assert tree(tmp_path) == before


def test_numbers_that_are_none_are_refused(tmp_path: Path) -> None:
    """One line that has the value in it, and 2."""
    config = tmp_path / "config.yaml"
    config.write_text("seed: 1\n", encoding="utf-8")
    for flags in (("--workers", "2,x"), ("--workers", "0"), ("--workers", "000019999"), ("--gpu-memory", "-1")):
        ended = andon("plan", config, *flags)
        assert (ended.code, ended.out, len(ended.said)) == (2, [], 1)
        assert flags[1] in ended.said[0]
