"""TensorBoard's event files, read back by TensorBoard: of a run, of one that was killed and goes on, and of a watch."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tensorboard")

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from andon.console.messages import InputError
from andon.integrations.tensorboard import EventFile, findings
from andon.integrations.trackers import require
from andon.run.folder import RunFolder
from tests.cli.command import files_up_to
from tests.integrations.told import measured, watched
from tests.training.runs import Runs, outcome

TRACKED = "run.report_to=[tensorboard]"


def events(folder: Path) -> Any:
    found = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    found.Reload()
    return found


def shown(folder: Path) -> dict[str, dict[int, float]]:
    """The scalars that TensorBoard shows by tag and step; a step that is shown twice fails."""
    read, found = events(RunFolder(folder).events), {}
    for tag in read.Tags()["scalars"]:
        each = read.Scalars(tag)
        assert len({event.step for event in each}) == len(each), tag
        found[tag] = {event.step: event.value for event in each}
    return found


def kept(folder: Path) -> dict[str, dict[int, float]]:
    return {tag: {step: np.float32(each) for step, each in of.items()} for tag, of in measured(folder).items()}


def test_a_run_is_shown_as_its_metrics_have_it(runs: Runs, whole: Path, tmp_path: Path) -> None:
    assert not RunFolder(whole).events.exists()
    assert runs.train(tmp_path / "run", TRACKED) == 0
    assert outcome(tmp_path / "run") == outcome(whole)
    assert shown(tmp_path / "run") == kept(tmp_path / "run")
    assert {"training/loss", "training/lr", "validation/accuracy"} <= shown(tmp_path / "run").keys()


def test_a_run_that_was_killed_goes_on_in_the_same_folder(runs: Runs, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    runs.train(folder, TRACKED, backend="gloo", workers=2, entry="tests.training.entries:kill_rank")
    assert sorted(shown(folder)["training/loss"])[:6] == list(range(1, 7))
    shutil.rmtree(RunFolder(folder).checkpoints / "step-00000006")
    assert runs.train(folder, TRACKED, resume="auto") == 0
    assert sorted(shown(folder)["training/loss"]) == list(range(1, 13))
    assert shown(folder) == kept(folder)
    assert len(list(RunFolder(folder).events.iterdir())) == 2


def test_a_failing_tracker_ends_no_run(runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    RunFolder(folder).lock.write_text('{"andon_run": 1}')
    RunFolder(folder).events.write_text("in the way")
    assert runs.train(folder, TRACKED) == 0
    (said,) = (line for line in capsys.readouterr().err.splitlines() if "TensorBoard" in line)
    assert "nothing more is written for TensorBoard" in said
    assert len(RunFolder(folder).metrics.read_text().splitlines()) > 12


def test_a_disk_that_is_full_in_the_middle_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with files_up_to(400):
        file = EventFile(tmp_path)
        for step in range(1, 100):
            file.line({"step": step, "loss": 1.0 / step})
    (said,) = (line for line in capsys.readouterr().err.splitlines() if "TensorBoard" in line)
    assert "File too large" in said
    steps = [event.step for event in events(tmp_path).Scalars("training/loss")]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= 3


def test_an_event_file_that_is_cut_off_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What would be written after the cut is a file without a head, of which TensorBoard shows nothing."""
    file = EventFile(tmp_path)
    for step in (1, 2, 3, 4):
        file.line({"step": step, "loss": 1.0})
        if step == 2:
            (path,) = tmp_path.iterdir()
            os.truncate(path, 10)
    (said,) = (line for line in capsys.readouterr().err.splitlines() if "TensorBoard" in line)
    assert f"{path}: was truncated by another program" in said
    assert path.stat().st_size == 10


def test_what_is_not_installed_is_said_before_the_run(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("andon.integrations.trackers.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"run.report_to: tensorboard is not installed; run: pip install '.\[tensorb"):
        runs.train(tmp_path / "run", TRACKED)
    assert not (tmp_path / "run").exists()
    with pytest.raises(InputError, match=r"run.report_to: wandb is not installed; run: pip install '.\[wandb"):
        require(("wandb",))
    require(())


def test_what_a_watch_finds_is_shown_as_text(tmp_path: Path) -> None:
    watched(findings(tmp_path / "e"))
    read = events(tmp_path / "e")
    tags = [tag for tag in read.Tags()["tensors"] if tag.startswith("andon/finite")]
    (event,) = read.Tensors(tags[0])
    assert event.step == 2
    assert "finite broken at step 2" in event.tensor_proto.string_val[0].decode()
