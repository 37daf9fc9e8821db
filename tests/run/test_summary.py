"""The summary: what is read is what was written, and a wrong one is named by its field."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from andon.console.problems import InputError
from andon.run.summary import Head, Summary, read_summary, write_summary
from andon_contracts.fields import Real

SUMMARY = Summary(
    run="r1",
    finished=True,
    reason="finished",
    steps=60,
    world_size=2,
    backend="gloo",
    weights_digest="ab" * 8,
    initial_weights_digest="cd" * 8,
    contracts={"replicas-agree": 120},
    violations=0,
    wall_s=12.5,
    ledger=Head(62, "ef" * 8),
    fingerprint={"torch": "2.13"},
    final_loss=Real.of(0.1),
    eval={"accuracy": 0.9, "macro_f1": 0.8, "confusion": "ab" * 8},
    best_step=50,
)


def test_a_summary_survives(tmp_path: Path) -> None:
    for summary in (SUMMARY, replace(SUMMARY, final_loss=None, best_step=None, eval={}, finished=False)):
        write_summary(tmp_path / "s.json", summary)
        assert read_summary(tmp_path / "s.json") == summary


def test_the_keys_are_the_promised_ones(tmp_path: Path) -> None:
    write_summary(tmp_path / "s.json", SUMMARY)
    found = json.loads((tmp_path / "s.json").read_text())
    assert found["final_loss"] == {"value": 0.1, "hex": (0.1).hex()}
    assert {"steps", "world_size", "backend", "weights_digest", "initial_weights_digest"} <= set(found)
    assert {"eval", "contracts", "violations", "wall_s"} <= set(found)
    assert isinstance(found["weights_digest"], str)
    assert isinstance(found["violations"], int)


def test_scores_that_are_not_finite_become_null(tmp_path: Path) -> None:
    summary = replace(SUMMARY, eval={"auroc": math.nan, "per": [math.inf, 1.0]}, final_loss=Real.of(math.nan))
    write_summary(tmp_path / "s.json", summary)
    found = read_summary(tmp_path / "s.json")
    assert found.eval == {"auroc": None, "per": [None, 1.0]}
    assert found.final_loss == Real.of(math.nan)


def test_a_wrong_summary_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="wall_s must be a float"):
        write_summary(tmp_path / "s.json", replace(SUMMARY, wall_s=12))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("text", "says"), [("{", "no summary"), ("{}", "run is missing"), ("[]", "object")])
def test_a_wrong_summary_is_an_input_error(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "s.json").write_text(text)
    with pytest.raises(InputError, match=says) as caught:
        read_summary(tmp_path / "s.json")
    assert "s.json" in str(caught.value)
    with pytest.raises(InputError, match="No such file"):
        read_summary(tmp_path / "none.json")
