"""The audit in a run of the trainer: it changes nothing, is counted, and says what it cannot see."""

from __future__ import annotations

from pathlib import Path

import pytest

from andon.config.schema import Config
from andon.step.audit import AuditSpec
from andon.training.session import audit_spec
from tests.training.runs import Runs, outcome, summary

EVERY_STEP = ("contracts.audit_every=1", "contracts.audit_coverage=all")


def test_an_audited_run_is_the_run(runs: Runs, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert runs.train(tmp_path / "r", *EVERY_STEP, workers=2) == 0
    assert outcome(tmp_path / "r") == outcome(run)
    assert summary(tmp_path / "r")["contracts"]["audit"] == 12
    said = capsys.readouterr().err.splitlines()
    assert "andon: audit: every 1 steps another rank computes every micro-batch of each rank again" in said


def test_a_run_that_is_too_short_for_its_audit_is_told(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for steps, told in ((2, True), (3, False)):
        assert runs.train(tmp_path / str(steps), "contracts.audit_every=3", f"training.max_steps={steps}") == 0
        said = capsys.readouterr().err
        assert "audit: every 3 steps" in said
        assert ("none falls into steps 1 to 2" in said) is told
        assert summary(tmp_path / str(steps))["contracts"].get("audit", 0) == int(not told)


def test_one_worker_is_told_what_it_cannot_see(runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert runs.train(tmp_path / "r", "training.max_steps=1", workers=1) == 0
    assert "one rank cannot see a persistent fault of its device" in capsys.readouterr().err


def test_the_default_costs_a_hundredth_and_can_be_switched_off() -> None:
    """K = ceil(100 W / M) with the default of 8 micro-batches; 0 is never."""
    assert audit_spec(Config(), 2) == AuditSpec(25, 1, 42)
    assert audit_spec(Config(), 4) == AuditSpec(50, 1, 42)
    off = Config.model_validate({"contracts": {"audit_every": 0, "audit_coverage": "all"}})
    assert audit_spec(off, 2) == AuditSpec(0, None, 42)
