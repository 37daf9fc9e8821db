"""`--resume auto` on a run that has finished: there is nothing to do, for that run alone."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from andon.config.load import load_config
from andon.config.schema import Config
from andon.console.problems import InputError
from andon.run.folder import RunFolder
from andon.training.existing import require_same_as_finished
from tests.training.runs import Runs


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
