"""One run folder, one launch: another that is begun there is refused, and the first goes on undisturbed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from andon.console.messages import Exit, InputError
from andon.launch.report import Report
from andon.run import folder as run_folder
from andon.run.folder import RunFolder
from andon.step.replica import Replica
from tests.launch.pipes import PATIENCE_S
from tests.training.runs import Runs, outcome, write_jsonl

RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "other"}
"""What torchrun tells the first of two ranks, as far as it is read before ranks meet."""


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(write_jsonl(tmp_path / "train.jsonl"))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_goes_on_while_others_are_refused_its_folder(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, update, refusals = tmp_path / "run", Replica.apply, list[str]()
    assert runs.train(tmp_path / "alone") == 0

    def refused() -> None:
        before = contents(run)
        for backend in ("inline", "gloo"):
            with pytest.raises(InputError) as caught:
                runs.train(run, backend=backend, resume="auto")
            refusals.append(str(caught.value))
        sets = [part for each in runs.overrides() for part in ("--set", each)]
        rank = [sys.executable, "-m", "andon", "train", *sets, "--run-dir", str(run), "--backend", "gloo"]
        done = subprocess.run(rank, env={**os.environ, **RANK}, capture_output=True, text=True, timeout=PATIENCE_S)
        assert done.returncode == Exit.USAGE, done.stderr
        (line,) = done.stderr.splitlines()
        refusals.append(line.partition(": ")[2])
        assert contents(run) == before

    def apply(replica: Replica) -> None:
        update(replica)
        if replica.updates == 7:
            refused()

    monkeypatch.setattr(Replica, "apply", apply)
    assert runs.train(run) == 0
    assert len(refusals) == 3
    assert all(f"{run}: is being written by process {os.getpid()} on " in each for each in refusals), refusals
    assert outcome(run) == outcome(tmp_path / "alone")


def test_a_folder_whose_ranks_are_not_there_yet_is_not_free(runs: Runs, tmp_path: Path) -> None:
    """Between a command's start and its rank 0, and before a restart, nobody holds the writer's lock."""
    folder = RunFolder(tmp_path / "run")
    with folder.open_for_writing():
        pass
    Report(0, 70, "of the first", 1.0).write(folder.path)
    with folder.claimed():
        before = contents(folder.path)
        with pytest.raises(InputError, match="is being written by process"):
            runs.train(folder.path, backend="gloo")
        assert contents(folder.path) == before
    assert not (folder.path / ".launch").exists()


def test_a_claim_leaves_no_folder_that_it_made(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "new").claimed():
        assert (tmp_path / "new").is_dir()
    with RunFolder(tmp_path).claimed():
        pass
    assert list(tmp_path.iterdir()) == []


class Interrupted(BaseException):
    """What a signal's handler raises, wherever the process is."""


@contextmanager
def interrupted_at(place: int) -> Iterator[list[None]]:
    """Raise `Interrupted` at this line that `run.folder` executes, counted from 1; how many it has executed."""
    passed: list[None] = []

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_filename != run_folder.__file__:
            return None
        if event == "line":
            passed.append(None)
            if len(passed) == place:
                raise Interrupted
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield passed
    finally:
        sys.settrace(before)


def test_a_claim_that_is_interrupted_anywhere_leaves_nothing(tmp_path: Path) -> None:
    """Before the folder is made, before the file is locked, as it is signed: neither of both stays, nor the lock."""
    folder = RunFolder(tmp_path / "new")
    with interrupted_at(0) as passed, folder.claimed():
        lines = len(passed)
    for place in range(1, lines + 1):
        with pytest.raises(Interrupted), interrupted_at(place), folder.claimed():
            raise AssertionError(f"not interrupted at line {place} of {lines}")
        assert not folder.path.exists(), f"interrupted at line {place} of {lines}"
    assert lines > 10


def test_a_claim_removes_no_other(tmp_path: Path) -> None:
    """Somebody put another folder in the place of the run's: the claim of the command that trains there stays."""
    folder, moved = RunFolder(tmp_path / "run"), tmp_path / "moved"
    with ExitStack() as other:
        with folder.claimed():
            folder.path.rename(moved)
            other.enter_context(folder.claimed())
        with pytest.raises(InputError, match="is being written by process"):
            folder.refuse_claimed()
    assert not (folder.path / ".launch").exists()
