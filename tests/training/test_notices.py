"""What is said of a plan before it is trained."""

from __future__ import annotations

from pathlib import Path

import pytest

from andon.config.load import load_config
from andon.console.exits import Exit
from andon.launch.launcher import LaunchResult
from andon.step.plan import BatchPlan
from andon.training import start
from andon.training.notices import idleness, learns_nothing
from andon.training.preview import describe
from tests.training.runs import Runs, write_jsonl


def test_workers_without_rows_are_said_before_they_are_started(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """60 processes may not fit into memory, and then nobody would know that 56 of them were for nothing."""
    said = []

    def launched(*_: object, workers: int, **__: object) -> LaunchResult:
        said.append((workers, capsys.readouterr().err))
        return LaunchResult(Exit.RANK_LOST, "as if they had been killed")

    monkeypatch.setattr(start, "launch", launched)
    monkeypatch.setattr(start, "warm_up", lambda _: None)
    for workers in (60, 4):
        assert runs.train(tmp_path / str(workers), backend="gloo", workers=workers) == Exit.RANK_LOST
    idle = "56 of 60 workers have no row in any update: an update has 8 rows in 4 micro-batches"
    assert [(workers, f"andon: warning: {idle}\n" in text) for workers, text in said] == [(60, True), (4, False)]
    assert idleness(BatchPlan((1,) * 41, 8, 4, 0, 2), load_config(None, runs.overrides(), {}), 60) == idle


@pytest.mark.parametrize(
    ("steps", "more", "warned"),
    [(1, (), True), (2, (), False), (1, ("schedule.warmup_fraction=1",), False), (1, ("schedule.min_lr=0.01",), False)],
)
def test_a_run_of_one_update_at_the_lowest_rate_is_said(
    runs: Runs, steps: int, more: tuple[str, ...], warned: bool
) -> None:
    """18 rows in one epoch of one batch trained nothing, and exit 0 said nothing."""
    config = load_config(None, runs.overrides(*more), {})
    plan = BatchPlan(tuple(range(8 * steps)), batch_size=8, micro_batches=4, seed=0, epochs=1)
    assert bool(learns_nothing(plan, config)) == warned
    if warned:
        assert "one update, and its learning rate is 1e-06 (optimizer.lr is 0.01)" in learns_nothing(plan, config)


def test_check_and_train_say_that_nothing_is_learned(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = (f"data.train={write_jsonl(tmp_path / 'few.jsonl', 9)}", "training.epochs=1")
    config = load_config(None, runs.overrides(*few), {})
    (line,) = [line for line in describe(config) if "one update" in line]
    assert runs.train(tmp_path / "run", *few) == Exit.OK
    assert f"andon: {line}\n" in capsys.readouterr().err
