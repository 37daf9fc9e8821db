"""The best checkpoint is the result of a run, and checkpoints by time change nothing of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from andon.console.messages import Exit, InputError
from andon.run.folder import RunFolder
from andon.training.build import Run
from andon.training.inference import evaluate_run, load_run, read_labelled
from andon.training.trainer import FolderJournal
from andon_contracts.violation import Violation
from andon_falsify.claims.ledgers import read_run, verify
from andon_falsify.verdict import Outcome
from tests.training.runs import Runs, checkpoints, outcome, records, summary, write_jsonl

STEEP = (
    "optimizer.lr=3e-2",
    "training.early_stopping_patience=1",
    "training.epochs=8",
    "training.checkpoint_every=null",
)


def validated(folder: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if line.get("what") == "validation"}


@pytest.fixture(scope="module")
def stopped(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("stopped")
    assert runs.train(place / "run", *STEEP, f"data.eval={write_jsonl(place / 'test.jsonl', 30)}") == Exit.OK
    return place / "run"


def test_what_is_exported_and_scored_are_the_weights_of_the_best_step(stopped: Path) -> None:
    found, losses, steps = summary(stopped), validated(stopped), records(stopped, "step")
    best = min(losses, key=losses.__getitem__)
    assert list(losses)[-2:] == [best, found["steps"]]
    assert (found["best_step"], found["kept_step"], found["reason"]) == (best, best, "early-stopping")
    assert found["weights_digest"] == steps[best - 1].digests.weights != steps[-1].digests.weights
    again = evaluate_run(load_run(RunFolder(stopped)), read_labelled(RunFolder(stopped), stopped.parent / "test.jsonl"))
    assert (again.rows, again.loss, again.as_dict()["mcc"]) == (30, found["eval"]["loss"], found["eval"]["mcc"])
    card = (stopped / "adapter" / "README.md").read_text()
    assert f"The validation loss chose the checkpoint of step {best} of {found['steps']}." in card
    assert f"`{found['weights_digest']}`" in card
    (end,) = records(stopped, "end")
    assert (end.step, end.digests) == (
        found["steps"],
        {"weights": steps[-1].digests.weights, "kept": found["weights_digest"]},
    )
    assert records(stopped, "eval")[-1].step == best
    assert {f"step-{step:08d}" for step in (best, found["steps"])} <= {*checkpoints(stopped)}
    assert all(verdict.outcome is not Outcome.FALSIFIED for verdict in verify([read_run(stopped)]))


@pytest.mark.parametrize(("backend", "workers", "until"), [("inline", 2, None), ("gloo", 4, None), ("inline", 2, 13)])
def test_any_number_of_workers_and_a_resume_keep_the_same(
    runs: Runs, stopped: Path, tmp_path: Path, backend: str, workers: int, until: int | None
) -> None:
    more = (*STEEP, f"data.eval={stopped.parent / 'test.jsonl'}")
    if until is not None:
        runs.stopped(tmp_path / "run", until, *more)
    assert runs.train(tmp_path / "run", *more, backend=backend, workers=workers, resume="auto") == Exit.OK
    assert outcome(tmp_path / "run") == outcome(stopped)


def test_each_evaluation_counts_wherever_it_falls(runs: Runs, tmp_path: Path) -> None:
    """The first evaluation without a lower loss ends the run within an epoch. The best step has a checkpoint."""
    folder, more = tmp_path / "run", (*STEEP, "training.evaluate_every=4")
    assert runs.train(folder, *more) == Exit.OK
    losses, found = validated(folder), summary(folder)
    values = list(losses.values())
    ends = next(place for place in range(1, len(values)) if values[place] >= values[place - 1])
    assert list(losses) == [4, 6, 8, 12, 16, 18, 20, 24][: ends + 1]
    assert (found["steps"], found["kept_step"]) == tuple(list(losses)[place] for place in (ends, ends - 1))
    assert {f"step-{step:08d}" for step in (found["kept_step"], found["steps"])} <= {*checkpoints(folder)}
    assert runs.train(runs.stopped(tmp_path / "cut", 5, *more), *more, resume="auto") == Exit.OK
    assert outcome(tmp_path / "cut") == outcome(folder)


def test_the_last_weights_stay_where_nothing_chose_others(runs: Runs, whole: Path, tmp_path: Path) -> None:
    assert summary(whole)["kept_step"] == 6
    for name, setting in (("last", "training.keep=last"), ("none", "data.validation_fraction=0")):
        assert runs.train(tmp_path / name, setting, f"data.eval={runs.data}") == Exit.OK
        found, last = summary(tmp_path / name), records(tmp_path / name, "step")[-1]
        assert (found.get("kept_step"), found["weights_digest"]) == (None, last.digests.weights)
        assert "chose the checkpoint" not in (tmp_path / name / "adapter" / "README.md").read_text()


def test_a_best_checkpoint_that_is_gone_is_an_error_with_a_way_out(runs: Runs, whole: Path, tmp_path: Path) -> None:
    folder, steps = tmp_path / "run", iter(range(1, 99))

    def stop() -> bool:
        if next(steps) == 9:
            shutil.rmtree(folder / "checkpoints" / "step-00000006")
        return False

    with pytest.raises(InputError, match=r"cannot read it.*move away all checkpoints from step 6 on and resume"):
        runs.inline(folder, stop=stop)
    assert not (folder / "summary.json").exists()
    for path in (folder / "checkpoints").glob("step-*"):
        if path.name > "step-00000006":
            shutil.rmtree(path)
    assert runs.train(folder, resume="auto") == Exit.OK
    assert outcome(folder) == outcome(whole)


def test_other_weights_than_the_best_on_one_rank_are_a_violation(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = Run.load_weights

    def other(run: Run, checkpoint: object) -> None:
        load(run, checkpoint)  # type: ignore[arg-type]
        run.replicas[-1].parameters.weights.data[3] *= -1.0

    monkeypatch.setattr(Run, "load_weights", other)
    with pytest.raises(Violation, match="checkpoint-whole broken at step 6 on rank 1"):
        runs.train(tmp_path / "run", workers=2)
    assert not (tmp_path / "run" / "adapter").exists()


@pytest.mark.parametrize(
    ("late", "took", "saved"), [(False, 0, [3, 6, 9, 12]), (False, 10, [3, 6, 10, 12]), (True, 0, [4, 6, 10, 12])]
)
def test_a_checkpoint_by_time_is_due_after_minutes_and_nineteen_times_its_cost(
    runs: Runs, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, late: bool, took: int, saved: list[int]
) -> None:
    """An update takes a minute and a checkpoint `took` seconds. late: an update is launched before the one before it
    is read, so its checkpoint comes one later."""
    now = [0]
    checkpoint = FolderJournal.checkpoint

    def stop() -> bool:
        now[0] += 60
        return False

    def slow(*given: object, **named: object) -> bool:
        now[0] += took
        return checkpoint(*given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr("andon.training.trainer.monotonic", lambda: now[0])
    monkeypatch.setattr("andon.step.step.reads_late", lambda backend: late)
    monkeypatch.setattr(FolderJournal, "checkpoint", slow)
    every = ("training.checkpoint_minutes=2.5", "training.checkpoint_every=null")
    assert runs.inline(tmp_path / "run", *every, stop=stop) == Exit.OK
    assert [record.step for record in records(tmp_path / "run", "checkpoint")] == saved
    assert outcome(tmp_path / "run") == outcome(whole)


def test_rank_0_decides_for_all_when_a_checkpoint_is_due(runs: Runs, whole: Path, tmp_path: Path) -> None:
    """No time at all must pass before the first one; how often then depends on how long one takes here."""
    every = ("training.checkpoint_minutes=1e-9", "training.checkpoint_every=null")
    assert runs.train(tmp_path / "run", *every, backend="gloo", workers=3) == Exit.OK
    assert records(tmp_path / "run", "checkpoint")[0].step == 1
    assert outcome(tmp_path / "run") == outcome(whole)
