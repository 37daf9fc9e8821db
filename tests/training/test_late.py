"""A run whose updates are judged a step late, as on GPUs, leaves what a run on a CPU leaves."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

import andon.step.step
from andon.config.load import load_config
from andon.console.exits import Exit
from andon.run.folder import RunFolder
from andon.step.replica import Replica
from andon.training.run import train
from andon_contracts.violation import Violation
from tests.training.entries import AT
from tests.training.runs import Runs, checkpoints, outcome, records, summary


@pytest.fixture(autouse=True)
def judged_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step of this process is judged late, although it is on the CPU."""
    monkeypatch.setattr(andon.step.step, "reads_late", lambda backend: True)


def _ledger(folder: Path) -> list[object]:
    return [step.digests for step in records(folder, "step")]


def test_a_late_violation_keeps_nothing_of_its_step(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A weight flips after update 7: found when update 7 is read, with update 8 launched and held back."""
    update = Replica.apply
    seen: list[Replica] = []

    def apply(replica: Replica) -> None:
        update(replica)
        if replica.updates == AT and not seen:
            seen.append(replica)
            replica.parameters.weights.data[3] *= -1.0

    monkeypatch.setattr(Replica, "apply", apply)
    folder = tmp_path / "run"
    with pytest.raises(Violation) as caught:
        runs.train(folder, backend="inline", workers=3)
    assert (caught.value.clause, caught.value.step) == ("replicas-agree", AT)
    assert [step.step for step in records(folder, "step")] == list(range(1, AT))
    assert summary(folder)["weights_digest"] == records(folder, "step")[-1].digests.weights


def test_a_late_run_that_is_asked_to_end_goes_on_to_the_same_bits(runs: Runs, whole: Path, tmp_path: Path) -> None:
    folder, steps = tmp_path / "run", itertools.count(1)
    config = load_config(None, runs.overrides(), {"run.dir": str(folder), "run.backend": "inline"})
    assert train(config, RunFolder(folder), lambda: next(steps) >= 2) == Exit.PREEMPTED
    assert [step.step for step in records(folder, "step")] == [1, 2, 3]
    assert checkpoints(folder) == ["step-00000003"]
    assert runs.train(folder, resume="auto") == 0
    assert outcome(folder) == outcome(whole)
