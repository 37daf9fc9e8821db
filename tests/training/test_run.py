"""Whole runs: what they leave, and the same bits wherever they are done."""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from andon.config.load import load_config
from andon.metrics.scores import read_confusion
from andon.run.folder import RunFolder
from andon.step.step import StepResult
from andon.training.inference import evaluate_run, load_run, read_labelled
from andon.training.preview import describe
from andon.training.trainer import FolderJournal
from andon_contracts.record import Step
from andon_falsify.claims.ledgers import read_run, verify
from andon_falsify.verdict import Outcome
from tests.training.runs import STEPS, Runs, checkpoints, outcome, records, summary, write_csv


@pytest.mark.parametrize(("backend", "workers"), [("inline", 4), ("gloo", 3)])
def test_any_number_of_workers_gives_the_same_bits(
    runs: Runs, whole: Path, tmp_path: Path, backend: str, workers: int
) -> None:
    assert runs.train(tmp_path / "run", backend=backend, workers=workers) == 0
    assert outcome(tmp_path / "run") == outcome(whole)
    assert (summary(tmp_path / "run")["backend"], summary(tmp_path / "run")["world_size"]) == (backend, workers)
    assert [s.digests for s in records(tmp_path / "run", "step")] == [s.digests for s in records(whole, "step")]


def test_a_clock_that_is_set_back_does_not_shorten_the_run(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system's clock loses a day at each look: the run still took some seconds."""
    today, days = time.time(), itertools.count()
    with monkeypatch.context() as patched:
        patched.setattr(time, "time", lambda: today - 86_400 * next(days))
        assert runs.inline(tmp_path / "run", "training.max_steps=1") == 0
    assert 0 < summary(tmp_path / "run")["wall_s"] < 3_600


def test_rows_grouped_by_length_give_the_same_bits_too(runs: Runs, whole: Path, tmp_path: Path) -> None:
    grouped = ("training.group_by_length=true", "training.pad_to_multiple_of=1")
    alone, together = tmp_path / "alone", tmp_path / "together"
    assert runs.train(alone, *grouped) == runs.train(together, *grouped, workers=3) == 0
    assert outcome(together) == outcome(alone) != outcome(whole)
    verdicts = {verdict.claim: verdict.outcome for verdict in verify([read_run(together)])}
    assert (verdicts["samples-once"], verdicts["plan-followed"]) == (Outcome.HOLDS, Outcome.NOT_APPLICABLE)


CHOSEN = ("run.backend=inline", "run.workers=1", "training.keep=best")


def test_a_run_leaves_what_is_promised(runs: Runs, whole: Path) -> None:
    promised = {"config.yaml", "environment.json", "metrics.jsonl", "checkpoints", "adapter", "base", "ledger.jsonl"}
    promised |= {"provenance.json", "summary.json", ".lock", "confusion"}
    assert {path.name for path in whole.iterdir()} == promised
    resolved = load_config(RunFolder(whole).config)
    assert resolved == load_config(None, runs.overrides(f"run.dir={whole}", *CHOSEN))
    assert checkpoints(whole) == ["step-00000006", "step-00000008", "step-00000012"]
    provenance = json.loads((whole / "provenance.json").read_text())
    assert {"commit", "identity", "digests", "environment", "fingerprint"} == provenance.keys()
    assert {"data", "base", "tokenizer", "initial_weights"} == provenance["digests"].keys()


def test_summary_ledger_and_metrics_have_what_is_promised(whole: Path) -> None:
    found, steps = summary(whole), records(whole, "step")
    for name in ("weights_digest", "initial_weights_digest", "backend"):
        assert isinstance(found[name], str)
    assert (found["steps"], found["world_size"], found["violations"], found["finished"]) == (STEPS, 1, 0, True)
    assert found["final_loss"] == {"value": steps[-1].loss.value, "hex": steps[-1].loss.hex}
    assert float.fromhex(found["final_loss"]["hex"]) == found["final_loss"]["value"]
    assert {"accuracy", "macro_f1", "mcc", "confusion"} <= found["eval"].keys()
    assert found["contracts"]["clip-once"] == STEPS
    assert all(type(count) is int and count > 0 for count in found["contracts"].values())
    assert found["wall_s"] > 0
    assert [step.step for step in steps] == list(range(1, STEPS + 1))
    for epoch in (0, 1):
        rows = [row for step in steps if step.epoch == epoch for row in step.ids]
        assert len(rows) == len(set(rows)) == 41
    metrics = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics if "loss" in line and "what" not in line] == list(range(1, STEPS + 1))
    assert [line["what"] for line in metrics if "what" in line] == ["validation", "validation", "last validation"]


def test_a_gradient_that_was_always_zero_is_said(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A base whose weights are all zero passes every contract and learns nothing; a single update that did counts."""
    inner, steps = FolderJournal.step, itertools.count(1)

    def zero(self: FolderJournal, batch: Any, result: StepResult, record: Step) -> None:
        inner(self, batch, replace(result, grad_norm=0.0 if next(steps) <= 3 else 0.5), record)

    monkeypatch.setattr(FolderJournal, "step", zero)
    for name, said in (("zero", True), ("some", False)):
        assert runs.inline(tmp_path / name, "training.max_steps=2") == 0
        line = "warning: the gradient of all 2 updates was exactly zero"
        assert (line in capsys.readouterr().err) is said


def test_scores_of_rows_that_chose_the_checkpoint_are_not_called_held_out(
    runs: Runs, whole: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert (summary(whole)["evaluated_on"], summary(whole)["labels"]) == ("last validation", ["blue", "green", "red"])
    for name, more, other in (("none", (), "evaluation"), ("some", (f"data.eval={runs.data}",), "last validation")):
        capfd.readouterr()
        assert runs.train(tmp_path / name, *more, "training.max_steps=1") == 0
        said, called = capfd.readouterr().err, summary(tmp_path / name)["evaluated_on"]
        assert f"{called} accuracy" in said
        assert ("evaluation after step 1: " in said) is (called == "evaluation")  # others are validation's again
        assert f"andon: next: andon predict {tmp_path / name} --data FILE\n" in said
        assert "step 1/1, epoch 1/1, loss " in said
        assert other not in said


def test_the_embedded_model_on_rows_of_ones_own_is_warned_of(
    runs: Runs, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert runs.train(tmp_path / "run", "training.max_steps=1") == 0
    assert capfd.readouterr().err.count("warning: --model is not set") == 1
    assert any(line.startswith("warning: --model is not set") for line in describe(load_config(None, runs.overrides())))


def test_csv_files_two_classes_and_an_encoder(tmp_path: Path) -> None:
    train, held = write_csv(tmp_path / "train.csv", range(30)), write_csv(tmp_path / "test.csv", range(30, 43))
    columns = ("data.text_column=sentence", "data.label_column=colour", f"data.eval={held}")
    more = (*columns, "model.architecture=encoder", "data.class_weights=inverse", "training.max_steps=3")
    assert Runs(train).train(tmp_path / "run", *more, workers=2) == 0
    found = summary(tmp_path / "run")["eval"]
    matrix = read_confusion(tmp_path / "run" / "confusion", found["confusion"])
    assert found["rows"] == sum(rows for _, _, rows in matrix.cells) == 13
    assert 0.0 <= found["auroc"] <= 1.0
    again = evaluate_run(load_run(RunFolder(tmp_path / "run")), read_labelled(RunFolder(tmp_path / "run"), held))
    assert again.confusion == matrix
    assert again.loss == found["loss"]
    train.write_bytes(train.read_bytes().replace(b"number 1", b"number 9", 1))
    unknown = evaluate_run(load_run(RunFolder(tmp_path / "run")), read_labelled(RunFolder(tmp_path / "run"), held))
    assert (unknown.loss, unknown.confusion) == (None, again.confusion)


def test_early_stopping_ends_where_it_ended(runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ("training.epochs=6", "optimizer.lr=3", "training.early_stopping_patience=1", "optimizer.clip_norm=null")
    folder = tmp_path / "run"
    assert runs.train(folder, *more, "training.max_steps=37") == 0
    assert "note: training.epochs ends the run at step 36, before training.max_steps\n" in capsys.readouterr().err
    before = outcome(folder)
    assert before["reason"] == "early-stopping"
    assert before["steps"] < 36
    (folder / "summary.json").unlink()
    assert runs.train(folder, *more, "training.max_steps=37", resume="auto") == 0
    assert outcome(folder) == before
    assert f"resume: from step-{before['steps']:08d}" in capsys.readouterr().err
