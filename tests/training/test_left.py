"""Whoever calls `sys.exit(0)` in the middle of a run does not make it a success: 71, which ranks, at which step."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from andon.console.exits import Exit
from andon.console.problems import InputError
from andon.step.replica import Replica
from andon_falsify.claims.ledgers import read_run, unfinished
from tests.training.entries import AT
from tests.training.runs import STEPS, Runs, outcome

SAID = {
    "all_leave": f"andon: ranks 0, 1 of 2: left by sys.exit(0) in the update of step {AT}, before the end of the run",
    "one_leaves": f"andon: rank 1 of 2: left by sys.exit(0) in the update of step {AT}, before the end of the run",
    "all_vanish": "andon: ranks 0, 1 of 2 ended with exit code 0 before the end of the run, and left no report",
}


@pytest.mark.parametrize("entry", SAID)
def test_ranks_that_leave_are_lost(
    runs: Runs, whole: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], entry: str
) -> None:
    """By `sys.exit` or by `os._exit`, all or one of them: 71 and who; the folder is not finished, and goes on."""
    folder = tmp_path / "run"
    ended = runs.train(folder, backend="gloo", workers=2, entry=f"tests.training.entries:{entry}")
    assert ended == Exit.RANK_LOST
    assert SAID[entry] in capfd.readouterr().err
    assert unfinished(read_run(folder)) == f"is not finished: {AT - 1} of {STEPS} steps, without an end in its ledger"
    if entry == "all_vanish":
        assert runs.train(folder, backend="threads", workers=1, resume="auto") == 0
        assert outcome(folder) == outcome(whole)
        assert unfinished(read_run(folder)) == ""


def test_in_one_process_it_is_no_success_either(
    runs: Runs,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    update = Replica.apply

    def apply(replica: Replica) -> None:
        update(replica)
        if replica.updates == AT:
            sys.exit(0)

    monkeypatch.setattr(Replica, "apply", apply)
    assert runs.train(tmp_path / "run", backend="threads", workers=2) == Exit.RANK_LOST
    said = capfd.readouterr().err
    assert f"the run is not finished: something in it called sys.exit(0) after step {AT - 1} of {STEPS}" in said
    assert f"--run-dir {tmp_path / 'run'} --resume auto" in said
    with pytest.raises(
        InputError, match=rf"a run that is not finished \(after step {AT - 1} of {STEPS}\); add --resume"
    ):
        runs.train(tmp_path / "run")
