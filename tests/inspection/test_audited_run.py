"""The audit in a run of the trainer: it changes nothing, is counted, and says what it cannot see."""

from __future__ import annotations

from pathlib import Path

import pytest

from andon.backend.base import InlineBackend
from andon.config.schema import Config, Contracts
from tests.step.test_audit import audited
from tests.support.toy import CPU
from tests.training.runs import Runs, outcome, summary

EVERY_STEP = ("run.progress=verbose", "contracts.audit_every=1", "contracts.audit_coverage=all")


def test_an_audited_run_is_the_run(runs: Runs, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert runs.train(tmp_path / "r", *EVERY_STEP, workers=2) == 0
    assert outcome(tmp_path / "r") == outcome(run)
    assert summary(tmp_path / "r")["contracts"]["audit"] == 12
    said = capsys.readouterr().err.splitlines()
    assert "andon: audit: every 1 steps each rank recomputes every micro-batch of another rank" in said


def test_a_run_that_is_too_short_for_its_audit_is_told(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for steps, told in ((2, True), (3, False)):
        options = "run.progress=verbose", "contracts.audit_every=3", f"training.max_steps={steps}"
        assert runs.train(tmp_path / str(steps), *options) == 0
        said = capsys.readouterr().err
        assert ("this run audits no step, since it has only steps 1 to 2" in said) is told
        assert summary(tmp_path / str(steps))["contracts"].get("audit", 0) == int(not told)


def test_one_worker_is_told_what_it_cannot_see(runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert runs.train(tmp_path / "r", "run.progress=verbose", "training.max_steps=1", workers=1) == 0
    assert "it cannot detect a permanent fault of its own device" in capsys.readouterr().err


def test_the_default_costs_a_hundredth_and_can_be_switched_off() -> None:
    """K = ceil(100 W / M) with the default of 8 micro-batches; 0 is never."""
    default, off = Config().contracts, Contracts(audit_every=0)
    for world, contracts, every in ((2, default, 25), (4, default, 50), (2, off, 0)):
        step, _ = audited(InlineBackend([CPU] * world), contracts)
        assert (step.audit.every, step.audit.coverage) == (every, 1)
