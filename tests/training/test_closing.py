"""Runs that were killed after their last step, and runs that have finished: nothing is done or written twice."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from andon.config.load import load_config
from andon.config.schema import Config
from andon.console.exits import Exit
from andon.console.problems import InputError
from andon.run.folder import RunFolder
from andon.run.ledger import LedgerWriter, read_ledger
from andon.training.existing import require_same_as_finished
from andon.training.run import train
from andon_contracts.fields import Real
from andon_contracts.record import Broken, End, Evaluation, Record
from andon_contracts.violation import Violation
from tests.training.runs import Runs, outcome, records, summary


def go_on(runs: Runs, folder: Path, *more: str, workers: int = 1) -> Exit:
    flags = {"run.dir": str(folder), "run.backend": "threads", "run.resume": "auto", "run.workers": workers}
    return train(load_config(None, runs.overrides(*more), flags), RunFolder(folder), lambda: False)


def cut(folder: Path, lines: int) -> None:
    """Leave the run as a kill does before its last `lines` lines of the ledger and its summary were written."""
    run = RunFolder(folder)
    run.summary.unlink()
    kept = run.ledger.read_bytes().splitlines(True)
    run.ledger.write_bytes(b"".join(kept[: len(kept) - lines]))


def scored(folder: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, RunFolder(folder).metrics.read_text().splitlines())
    return [line for line in lines if line.get("what") == "last validation"]


def without_counts(folder: Path) -> dict[str, Any]:
    """The summary but for what tells of one process: its time, its memory, how often it evaluated each clause."""
    return {name: value for name, value in summary(folder).items() if name not in ("wall_s", "contracts", "memory")}


@pytest.mark.parametrize("workers", [1, 3])
def test_only_the_summary_lacks(runs: Runs, whole: Path, copy: Path, workers: int) -> None:
    """The ledger stays as it is to the byte, wherever the run goes on, and the summary is what it would have been."""
    before = RunFolder(copy).ledger.read_bytes()
    cut(copy, 0)
    assert go_on(runs, copy, workers=workers) == Exit.OK
    assert RunFolder(copy).ledger.read_bytes() == before
    assert without_counts(copy) == without_counts(whole)
    assert scored(copy) == scored(whole)
    assert len(scored(copy)) == 1


@pytest.mark.parametrize(("lines", "kinds"), [(1, ["eval", "resume", "end"]), (2, ["resume", "eval", "end"])])
def test_each_line_of_the_end_is_written_once(
    runs: Runs, whole: Path, copy: Path, lines: int, kinds: list[str]
) -> None:
    cut(copy, lines)
    assert go_on(runs, copy) == Exit.OK
    found = list(read_ledger(RunFolder(copy).ledger))
    assert [record.kind for record in found][-len(kinds) :] == kinds
    assert [records(copy, kind) for kind in ("eval", "end")] == [records(whole, kind) for kind in ("eval", "end")]
    assert outcome(copy) == outcome(whole)
    assert summary(copy)["ledger"]["count"] == len(found)
    assert len(scored(copy)) == 1


@pytest.mark.parametrize("kind", [Evaluation, End])
def test_other_scores_than_before_are_a_violation(runs: Runs, copy: Path, kind: type[Evaluation | End]) -> None:
    cut(copy, 0)
    forge(copy, kind)
    with pytest.raises(Violation, match="resume-exact broken at step 12") as caught:
        go_on(runs, copy)
    assert ("scores: " in str(caught.value)) == (kind is Evaluation)
    assert summary(copy)["violations"] == 1
    assert isinstance(list(read_ledger(RunFolder(copy).ledger))[-2], Broken)


def forge(folder: Path, kind: type[Evaluation | End]) -> None:
    """Other last scores, or another last loss, in a chain that fits."""
    ledger = RunFolder(folder).ledger
    found = list(read_ledger(ledger))
    last = max(place for place, record in enumerate(found) if isinstance(record, kind))
    found[last] = changed(found[last])
    ledger.unlink()
    with LedgerWriter(ledger) as writer:
        for record in found:
            writer.append(record)


def changed(record: Record) -> Record:
    if isinstance(record, Evaluation):
        return replace(record, scores={**record.scores, "loss": Real.of(2 * record.scores["loss"].value)})
    if isinstance(record, End) and record.final_loss is not None:
        return replace(record, final_loss=Real.of(2 * record.final_loss.value))
    raise AssertionError(record)


def test_a_finished_run_has_nothing_to_do(runs: Runs, whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*")}
    assert runs.train(whole, resume="auto") == 0
    assert "finished, nothing to do" in capsys.readouterr().err
    with pytest.raises(InputError, match="holds a run; add --resume auto"):
        runs.train(whole)
    assert {path: path.stat().st_mtime_ns for path in whole.rglob("*")} == before


def test_a_finished_run_is_not_taken_for_another(runs: Runs, whole: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"training\.epochs: was"):
        runs.train(whole, "training.epochs=3", resume="auto")
    config = load_config(whole / "config.yaml")
    require_same_as_finished(config, RunFolder(whole))
    with pytest.raises(InputError, match="seed: was 42 in the finished run"):
        require_same_as_finished(config.model_copy(update={"seed": 7}), RunFolder(whole))
    same, other = tmp_path / "same.jsonl", tmp_path / "other.jsonl"
    assert config.data.train is not None
    lines = Path(config.data.train).read_text(encoding="utf-8").splitlines(keepends=True)
    same.write_text("".join(lines), encoding="utf-8")
    other.write_text("".join(lines[:-1]), encoding="utf-8")
    moved, fewer = (
        config.model_copy(update={"data": config.data.model_copy(update={"train": str(p)})}) for p in (same, other)
    )
    require_same_as_finished(moved, RunFolder(whole))
    with pytest.raises(InputError, match="data: is not that of the finished run"):
        require_same_as_finished(fewer, RunFolder(whole))


def test_data_that_is_gone_or_unknown_is_no_other(runs: Runs, whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    gone = tmp_path / "gone.jsonl"
    said = (folder / "config.yaml").read_text(encoding="utf-8")
    (folder / "config.yaml").write_text(said.replace(str(runs.data), str(gone)), encoding="utf-8")
    config = load_config(folder / "config.yaml")
    assert config.data.train == str(gone)
    require_same_as_finished(config, RunFolder(folder))
    with pytest.raises(InputError, match="no such file"):
        require_same_as_finished(_with(config, "data", train=str(tmp_path / "elsewhere.jsonl")), RunFolder(folder))
    with pytest.raises(InputError, match=r"model\.base: was None .* is 'llama'"):
        require_same_as_finished(_with(config, "model", base="llama"), RunFolder(folder))
    with pytest.raises(InputError, match=r"data\.text_column: was"):
        require_same_as_finished(_with(config, "data", text_column="label"), RunFolder(folder))
    (folder / "provenance.json").unlink()
    require_same_as_finished(_with(config, "data", train=str(runs.data)), RunFolder(folder))


def _with(config: Config, part: str, **values: object) -> Config:
    return config.model_copy(update={part: getattr(config, part).model_copy(update=values)})
