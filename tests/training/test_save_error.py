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

from andon.console.exits import Exit
from andon.console.problems import InputError
from andon.run import checkpoint
from andon.run.folder import RunFolder
from andon.training import run
from andon_contracts.violation import Violation
from tests.training.entries import after_update, refusing
from tests.training.runs import Runs, checkpoints, outcome, records, summary

GO_ON = "run.on_save_error=continue"
ONE = "training.keep_checkpoints=1"
WARNED = "the best step, 6, has no checkpoint: the run keeps the weights of the last step"


def test_it_stops_where_nothing_else_is_asked_for(runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "write_new", refusing(8))
    with pytest.raises(InputError, match="step-00000008: cannot be written: the disk is full"):
        runs.inline(tmp_path / "run")
    assert checkpoints(tmp_path / "run") == ["step-00000004", "step-00000006"]


def test_it_goes_on_and_says_what_it_goes_on_with(
    runs: Runs, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checkpoint, "write_new", refusing(4, 8))
    assert runs.inline(tmp_path / "run", GO_ON) == Exit.OK
    said = capsys.readouterr().err
    assert "step-00000004: cannot be written: the disk is full" in said
    assert "going on without it (run.on_save_error=continue); there is no checkpoint yet" in said
    assert "the last one, step-00000006, is intact" in said
    assert outcome(tmp_path / "run") == outcome(whole)
    assert checkpoints(tmp_path / "run") == ["step-00000006", "step-00000012"]
    assert [saved.step for saved in records(tmp_path / "run", "checkpoint")] == [6, 12]


def test_an_old_checkpoint_that_cannot_be_removed_stays(
    runs: Runs, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise InputError("cannot be read: the disk failed")

    monkeypatch.setattr("andon.training.journal.prune", refuse)
    assert runs.inline(tmp_path / "run", GO_ON) == Exit.OK
    assert "warning: an old checkpoint stays: cannot be read: the disk failed" in capsys.readouterr().err
    assert outcome(tmp_path / "run") == outcome(whole)
    with pytest.raises(InputError, match="the disk failed"):
        runs.inline(tmp_path / "other")


def test_all_ranks_decide_alike(runs: Runs, whole: Path, tmp_path: Path) -> None:
    entry = "tests.training.entries:full_in_rank"
    assert runs.train(tmp_path / "run", GO_ON, backend="gloo", workers=2, entry=entry) == Exit.OK
    ends_without_its_best(tmp_path / "run", whole)
    assert runs.train(tmp_path / "other", backend="gloo", workers=2, entry=entry) == Exit.USAGE
    assert checkpoints(tmp_path / "other") == ["step-00000004"]


def test_the_best_that_is_on_disk_stays(runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, more = tmp_path / "run", (GO_ON, ONE, "training.epochs=3", "optimizer.lr=0.03")
    monkeypatch.setattr(checkpoint, "write_new", refusing(12))
    assert runs.inline(folder, *more, until=13) == Exit.PREEMPTED
    assert summary(folder)["best_step"] == 12
    assert checkpoints(folder) == ["step-00000006", "step-00000013"]
    assert runs.inline(folder, *more, "run.resume=auto", until=3) == Exit.PREEMPTED
    assert checkpoints(folder) == ["step-00000006", "step-00000016"]


def test_the_last_one_of_a_run_is_not_done_without(runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "write_new", refusing(5))
    with pytest.raises(InputError, match="step-00000005: cannot be written"):
        runs.inline(tmp_path / "run", GO_ON, until=5)


def test_nobody_goes_on_with_a_damaged_checkpoint(runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def damage(path: Path) -> None:
        os.truncate(path.parents[1] / "step-00000006" / "state.json", 5)

    monkeypatch.setattr(checkpoint, "write_new", refusing(8, before=damage))
    with pytest.raises(Violation, match=r"checkpoint-whole broken at step 6.*state.json"):
        runs.inline(tmp_path / "run", GO_ON)


def at_step(step: int, act: Callable[[], object]) -> Callable[[], bool]:
    steps = itertools.count(1)

    def stop() -> bool:
        if next(steps) == step:
            act()
        return False

    return stop


@pytest.mark.parametrize("at", [2, 7])
def test_checkpoints_that_somebody_removes_are_made_again(
    runs: Runs, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], at: int
) -> None:
    folder = tmp_path / "run" / "checkpoints"
    stop = at_step(at, lambda: shutil.rmtree(folder))
    assert runs.inline(tmp_path / "run", GO_ON, stop=stop) == Exit.OK
    said = capsys.readouterr().err
    lost = ", and step-00000006 with it" if at == 7 else ""
    assert f"warning: {folder} was removed while the run wrote to it{lost}; made again" in said
    assert checkpoints(tmp_path / "run")[-2:] == ["step-00000008", "step-00000012"]
    if at == 7:
        assert WARNED in said
        ends_without_its_best(tmp_path / "run", whole)
    else:
        assert outcome(tmp_path / "run") == outcome(whole)


def ends_without_its_best(folder: Path, whole: Path) -> None:
    """Every update is that of `whole`, and the weights of the last one are kept."""
    steps, found = records(folder, "step"), summary(folder)
    assert [step.digests for step in steps] == [step.digests for step in records(whole, "step")]
    assert (found["best_step"], found["weights_digest"]) == (6, steps[-1].digests.weights)
    assert found.get("kept_step") is None


@pytest.mark.parametrize(("left", "both"), [((), True), (("state.json",), False)])
def test_a_last_checkpoint_that_somebody_removed_is_said(
    runs: Runs,
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    left: tuple[str, ...],
    both: bool,
) -> None:
    def going(path: Path) -> None:
        last = path.parents[1] / "step-00000006"
        for each in last.iterdir():
            if each.name not in left:
                each.unlink()
        if not left:
            last.rmdir()
        if both:
            shutil.rmtree(last.with_name("step-00000004"))

    monkeypatch.setattr(checkpoint, "write_new", refusing(8, before=going))
    assert runs.inline(tmp_path / "run", GO_ON) == Exit.OK
    there = "there is none to resume from" if both else "the newest that is there is step-00000004"
    said = capsys.readouterr().err
    assert f"the last one, step-00000006, was removed: {there}" in said
    assert WARNED in said
    ends_without_its_best(tmp_path / "run", whole)


@pytest.mark.parametrize(("setting", "replaced"), [("run.log_every=9", None), (GO_ON, "empty"), (GO_ON, "copy")])
def test_a_run_whose_folder_goes_ends_at_its_next_step(
    runs: Runs, whole: Path, tmp_path: Path, setting: str, replaced: str | None
) -> None:
    folder = tmp_path / "run"

    def go() -> None:
        shutil.rmtree(folder)
        if replaced == "empty":
            folder.mkdir()
        if replaced == "copy":
            shutil.copytree(whole, folder)

    with pytest.raises(InputError) as caught:
        runs.inline(folder, setting, stop=at_step(7, go))
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
    folder, inner = tmp_path / "run", run._summarise

    def late(*given: Any) -> None:
        os.truncate(folder / "ledger.jsonl", 100)
        inner(*given)

    monkeypatch.setattr(run, "_summarise", late)
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


MORE = '{"text": "one more", "label": "red"}\n'
CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a row more": (lambda path: path.write_text(path.read_text() + MORE), "has 46 rows now, and 45 were read"),
    "other rows": (lambda path: path.write_text(path.read_text().replace("thing", "being")), "has 45 rows now"),
    "no rows": (lambda path: path.unlink(), "can no longer be read"),
    "only touched": (lambda path: path.touch(), ""),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_data_is_told_at_the_end(
    runs: Runs,
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    change: str,
) -> None:
    do, words = CHANGES[change]
    own = Runs(Path(shutil.copy(runs.data, tmp_path / "train.jsonl")))
    after_update(monkeypatch, 5, lambda replica: do(own.data))
    assert own.train(tmp_path / "run") == 0
    assert outcome(tmp_path / "run") == outcome(whole)
    told = [line for line in capfd.readouterr().err.splitlines() if "data.train is not what this run was" in line]
    found = summary(tmp_path / "run").get("data_changed", {})
    assert len(told) == len(found) == (1 if words else 0)
    assert all(words in line for line in (*told, *found.values()))
