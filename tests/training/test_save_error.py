"""Faults around a run while it trains: a full disk, removed folders, changed data, a closed standard error."""

from __future__ import annotations

import io
import itertools
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import pytest

from andon.console.messages import Exit, InputError
from andon.run import checkpoint
from andon.run.folder import RunFolder
from andon.training import run
from tests.training.entries import refusing
from tests.training.runs import Runs, checkpoints, outcome


def at_step(step: int, act: Callable[[], object]) -> Callable[[], bool]:
    steps = itertools.count(1)

    def stop() -> bool:
        if next(steps) == step:
            act()
        return False

    return stop


def refuse(*_: object, **__: object) -> None:
    raise InputError("cannot be read: the disk failed")


def test_a_disk_that_refuses_a_checkpoint_ends_the_run(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_new", refusing(8))
        with pytest.raises(InputError, match="step-00000008: cannot be written: the disk is full"):
            runs.inline(tmp_path / "run")
    assert checkpoints(tmp_path / "run") == ["step-00000004", "step-00000006"]
    monkeypatch.setattr("andon.training.trainer.prune", refuse)
    with pytest.raises(InputError, match="cannot be read: the disk failed"):
        runs.inline(tmp_path / "other")


def test_checkpoints_that_somebody_removes_end_the_run(runs: Runs, tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    with pytest.raises(InputError, match=f"{folder}.*: cannot be written: the folder is gone"):
        runs.inline(tmp_path / "run", stop=at_step(7, lambda: shutil.rmtree(folder)))
    assert not folder.exists()


def test_all_ranks_decide_alike(runs: Runs, tmp_path: Path) -> None:
    entry = "tests.training.entries:full_in_rank"
    assert runs.train(tmp_path / "run", backend="gloo", workers=2, entry=entry) == Exit.USAGE
    assert checkpoints(tmp_path / "run") == ["step-00000004"]


@pytest.mark.parametrize("replaced", [None, "empty", "copy"])
def test_a_run_whose_folder_goes_ends_at_its_next_step(
    runs: Runs, whole: Path, tmp_path: Path, replaced: str | None
) -> None:
    folder = tmp_path / "run"

    def go() -> None:
        shutil.rmtree(folder)
        if replaced == "empty":
            folder.mkdir()
        if replaced == "copy":
            shutil.copytree(whole, folder)

    with pytest.raises(InputError) as caught:
        runs.inline(folder, stop=at_step(7, go))
    what = "was removed, moved or replaced while the run wrote to it; its lines would be lost"
    assert str(caught.value) == f"{folder / 'ledger.jsonl'}: {what}"
    found = {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    other = {path.relative_to(whole): path.read_bytes() for path in whole.rglob("*") if path.is_file()}
    assert found == (other if replaced == "copy" else {})


@pytest.mark.parametrize("name", ["ledger.jsonl", "metrics.jsonl"])
def test_a_run_whose_lines_are_cut_off_ends_at_its_next_step(runs: Runs, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "run"
    with pytest.raises(InputError, match=f"{folder / name}: was truncated by another program .* it has 0 bytes"):
        runs.inline(folder, stop=at_step(7, lambda: os.truncate(folder / name, 0)))
    assert not RunFolder(folder).summary.exists()


def test_a_ledger_that_is_cut_after_its_last_line_finishes_no_run(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, inner = tmp_path / "run", run._write_summary

    def late(*given: Any) -> None:
        os.truncate(folder / "ledger.jsonl", 100)
        inner(*given)

    monkeypatch.setattr(run, "_write_summary", late)
    with pytest.raises(InputError, match=r"ledger.jsonl: was truncated by another program .* it has 100 bytes"):
        runs.inline(folder)
    assert not RunFolder(folder).summary.exists()


def _full() -> TextIO:
    return open("/dev/full", "w", encoding="utf-8", buffering=1)


def _closed() -> TextIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("broken", [_full, _closed])
def test_a_run_goes_on_without_its_lines(
    runs: Runs, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: Callable[[], TextIO]
) -> None:
    stream = broken()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stream)  # here: pytest puts its own between a fixture and its test
        assert runs.train(tmp_path / "run", "run.log_every=1") == 0
    with suppress(OSError):
        stream.close()
    assert outcome(tmp_path / "run") == outcome(whole)
