"""Runs that end before their last step, by a broken contract (70) or a rank that leaves (71), keep nothing of it."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

import andon.step.step
from andon.console.messages import Exit, InputError
from andon.inspection.recorded import open_recorded
from andon.inspection.show import overview
from andon.run.folder import RunFolder
from andon_contracts.violation import Violation
from andon_falsify.claims.ledgers import read_run, unfinished, verify
from andon_falsify.verdict import Outcome
from tests.training.entries import AT, after_update
from tests.training.runs import STEPS, Runs, checkpoints, outcome, records, summary


def kept(folder: Path) -> None:
    """What a violation at step 7 leaves: the steps that held, the violation, the last checkpoint before it."""
    assert [step.step for step in records(folder, "step")] == list(range(1, AT))
    (broken,) = records(folder, "violation")
    assert (broken.clause, broken.step, broken.ranks) == ("replicas-agree", AT, (1,))
    found = summary(folder)
    assert (found["violations"], found["steps"], found["reason"], found["finished"]) == (1, AT - 1, "violation", False)
    assert found["weights_digest"] == records(folder, "step")[-1].digests.weights
    assert checkpoints(folder) == ["step-00000004", "step-00000006"]


def test_every_rank_process_ends_with_70(
    runs: Runs, whole: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    ended = runs.train(folder, backend="gloo", workers=3, entry="tests.training.entries:flip_weight")
    assert ended == Exit.VIOLATION
    codes = [json.loads((folder / "reports" / f"rank-{rank}.json").read_text())["exit"] for rank in range(3)]
    assert codes == [Exit.VIOLATION] * 3
    lines = [line for line in capfd.readouterr().err.splitlines() if "broken" in line]
    (line,) = lines
    assert line.startswith(f"andon: replicas-agree broken at step {AT} on rank 1 in ")
    kept(folder)
    assert runs.train(folder, workers=2, resume="auto") == 0
    assert outcome(folder) == outcome(whole)
    assert summary(folder)["violations"] == 1
    last = capfd.readouterr().err
    assert "violations before the run was resumed: 1; " in last
    assert "no violation" not in last


def test_updates_that_a_violation_was_found_behind_are_taken_back(runs: Runs, whole: Path, tmp_path: Path) -> None:
    """Only step 12 sees a frozen weight that is wrong from update 10 on; in `untold` the ledger does not say so."""
    folder = tmp_path / "run"
    ended = runs.train(folder, backend="gloo", workers=2, entry="tests.training.entries:flip_base")
    assert ended == Exit.VIOLATION
    (broken,) = records(folder, "violation")
    assert (broken.clause, broken.step, broken.applied) == ("base-frozen", 12, True)
    (taken_back,) = records(folder, "retraction")
    assert (taken_back.step, taken_back.last, taken_back.clause) == (8, 12, "base-frozen")
    assert [step.step for step in records(folder, "step")] == list(range(1, 13))
    untold = Path(shutil.copytree(folder, tmp_path / "untold"))
    ledger = RunFolder(untold).ledger
    ledger.write_bytes(b"".join(ledger.read_bytes().splitlines(True)[:-2]))
    for each in (folder, untold):
        assert runs.train(each, workers=1, resume="auto") == 0
        assert outcome(each) == outcome(whole)
        assert len(records(each, "retraction")) == 1
        assert [step.step for step in records(each, "step")] == [*range(1, 13), *range(9, 13)]
        assert Outcome.FALSIFIED not in {verdict.outcome for verdict in verify([read_run(each)])}
        lines = list(overview(open_recorded(each)))
        assert any(line.startswith("retraction  steps 9 to 12 no longer count, since base-frozen") for line in lines)


def test_a_checkpoint_that_is_not_what_was_saved_ends_every_rank(
    runs: Runs, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    ended = runs.train(folder, backend="gloo", workers=2, entry="tests.training.entries:cut_checkpoint")
    assert ended == Exit.VIOLATION
    codes = [json.loads((folder / "reports" / f"rank-{rank}.json").read_text())["exit"] for rank in (0, 1)]
    assert codes == [Exit.VIOLATION] * 2
    assert "checkpoint-whole broken at step 8" in capfd.readouterr().err
    assert checkpoints(folder) == ["step-00000004", "step-00000006"]


SAID = {
    "all_leave": f"andon: ranks 0, 1 of 2: left by sys.exit(0) in the update of step {AT}, before the end of the run",
    "one_leaves": f"andon: rank 1 of 2: left by sys.exit(0) in the update of step {AT}, before the end of the run",
    "all_vanish": "andon: ranks 0, 1 of 2 ended with exit code 0 before the end of the run, and left no report",
}


def test_token_ids_are_compared_between_hosts(
    runs: Runs, whole: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each host has its own token cache. Another token of one row is refused before step 1, and its host named."""
    entry = "tests.training.entries:other_host"
    assert runs.train(tmp_path / "same", backend="gloo", workers=2, entry=entry) == 0
    assert outcome(tmp_path / "same") == outcome(whole)
    (tmp_path / "differs").touch()
    shutil.rmtree(tmp_path / "host-b")
    assert runs.train(tmp_path / "other", backend="gloo", workers=2, entry=entry) == 2
    assert "the same rows have different token ids on host-b (rank 1) than on" in capfd.readouterr().err
    assert not (tmp_path / "other" / "ledger.jsonl").exists()


@pytest.mark.parametrize("entry", SAID)
def test_ranks_that_leave_are_lost(
    runs: Runs, whole: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], entry: str
) -> None:
    folder = tmp_path / "run"
    ended = runs.train(folder, backend="gloo", workers=2, entry=f"tests.training.entries:{entry}")
    assert ended == Exit.RANK_LOST
    said = capfd.readouterr().err
    assert SAID[entry] in said
    assert said.endswith(f"; resume with: andon train {folder}/config.yaml --run-dir {folder} --resume auto\n")
    assert unfinished(read_run(folder)) == f"is not finished: {AT - 1} of {STEPS} steps, without an end in its ledger"
    if entry == "all_vanish":
        assert runs.train(folder, workers=1, resume="auto") == 0
        assert outcome(folder) == outcome(whole)
        assert unfinished(read_run(folder)) == ""


def test_to_leave_in_one_process_is_no_success_either(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    after_update(monkeypatch, AT, lambda replica: sys.exit(0), each=True)
    assert runs.train(tmp_path / "run", workers=2) == Exit.RANK_LOST
    said = capfd.readouterr().err
    assert f"the run is not finished: code in the run called sys.exit(0) after step {AT - 1} of {STEPS}" in said
    assert f"--run-dir {tmp_path / 'run'} --resume auto" in said
    with pytest.raises(
        InputError, match=rf"a run that is not finished \(after step {AT - 1} of {STEPS}\); add --resume"
    ):
        runs.train(tmp_path / "run")


@pytest.fixture
def judged_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(andon.step.step, "reads_late", lambda backend: True)


@pytest.mark.usefixtures("judged_late")
def test_a_late_violation_keeps_none_of_its_step(runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight flips after update 7: found when update 7 is read, with update 8 launched and held back."""
    after_update(monkeypatch, AT, lambda replica: replica.parameters.weights.data[3].mul_(-1.0))
    folder = tmp_path / "run"
    with pytest.raises(Violation) as caught:
        runs.train(folder, backend="inline", workers=3)
    assert (caught.value.clause, caught.value.step) == ("replicas-agree", AT)
    assert [step.step for step in records(folder, "step")] == list(range(1, AT))
    assert summary(folder)["weights_digest"] == records(folder, "step")[-1].digests.weights


@pytest.mark.usefixtures("judged_late")
def test_a_late_run_that_is_asked_to_end_goes_on_to_the_same_bits(runs: Runs, whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert runs.inline(folder, until=2) == Exit.PREEMPTED
    assert [step.step for step in records(folder, "step")] == [1, 2, 3]
    assert checkpoints(folder) == ["step-00000003"]
    assert runs.train(folder, resume="auto") == 0
    assert outcome(folder) == outcome(whole)
