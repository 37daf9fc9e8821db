"""Several files to train on, with weights: one run, the same on any number of workers, with rows that can be found."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import andon
from andon.cli.commands import app
from andon.config.load import load_config
from andon.console.messages import Exit, InputError
from andon.training.preview import describe
from andon_falsify.claims.ledgers import read_run, verify
from andon_falsify.verdict import Outcome
from tests.training.runs import SMALL, Runs, outcome, records, row, sections, summary

SIZES, WEIGHTS = (20, 12), (0.5, 2.25)


def _row(task: str, number: int) -> dict[str, Any]:
    text, label = row(number)
    return {"text": text, "label": label} if task == "classification" else {"prompt": text, "completion": label}


def mixture(folder: Path, task: str, weights: tuple[float, ...] = WEIGHTS) -> Runs:
    number = 0
    for name, size in zip("ab", SIZES, strict=True):
        lines = [json.dumps(_row(task, each)) for each in range(number, number + size)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        number += size
    files = [{"path": str(folder / f"{n}.jsonl"), "weight": w} for n, w in zip("ab", weights, strict=True)]
    packed = ("training.packing=true", "training.batch_size=4", "model.max_length=96")
    return Runs(json.dumps(files), packed if task == "sft-packed" else ())


@pytest.mark.parametrize("task", ["classification", "sft-packed"])
def test_a_resumed_run_ends_with_the_same_bits(task: str, tmp_path: Path) -> None:
    runs = mixture(tmp_path, task)
    alone, again = tmp_path / "alone", runs.stopped(tmp_path / "again", 3)
    assert runs.train(alone) == Exit.OK
    assert runs.train(again, workers=3, resume="auto") == Exit.OK
    assert outcome(alone) == outcome(again)
    assert summary(alone)["eval"]["sources"].keys() <= {"a.jsonl", "b.jsonl"}
    assert sum(each["rows"] for each in summary(alone)["eval"]["sources"].values()) == summary(alone)["eval"]["rows"]
    verdicts = {verdict.claim: verdict.outcome for verdict in verify([read_run(alone), read_run(again)])}
    assert Outcome.FALSIFIED not in verdicts.values(), verdicts
    assert verdicts["samples-once"] is Outcome.HOLDS


def test_an_epoch_of_the_ledger_has_each_row_as_often_as_its_file_says(tmp_path: Path) -> None:
    assert mixture(tmp_path, "classification").train(tmp_path / "run") == Exit.OK
    total = sum(SIZES)
    for epoch in (0, 1):
        ids = [id_ for step in records(tmp_path / "run", "step") if step.epoch == epoch for id_ in step.ids]
        assert len(set(ids)) == len(ids)
        stands = Counter(id_ % total for id_ in ids)
        first, second = ([stands[row] for row in rows if row in stands] for rows in (range(20), range(20, 32)))
        assert set(first) == {1}
        assert set(second) == {2, 3}
    copy = next(id_ for id_ in ids if id_ >= 2 * total)
    step = next(each.step for each in records(tmp_path / "run", "step") if copy in each.ids)
    told = CliRunner().invoke(app, ["show", str(tmp_path / "run"), "--step", str(step)]).stdout
    place = f"{copy}  {tmp_path / 'b.jsonl'}:{copy % total - 20 + 1}, copy 3"
    assert place in told


def test_other_weights_and_other_rows_are_another_run(tmp_path: Path) -> None:
    runs = mixture(tmp_path, "classification")
    folder = runs.stopped(tmp_path / "run", 2)
    for weights in ((0.5, 2.5), (1.0, 1.0)):
        with pytest.raises(InputError, match=rf"data.weights: was \[0.5, 2.25\] when the run began, is \[{weights[0]}"):
            mixture(tmp_path, "classification", weights).train(folder, resume="auto")
    first, second = (tmp_path / f"{name}.jsonl" for name in "ab")
    lines = [*first.read_text().splitlines(keepends=True), *second.read_text().splitlines(keepends=True)]
    first.write_text("".join(lines[:19]))
    second.write_text("".join(lines[19:]))
    with pytest.raises(InputError, match="data: was"):
        runs.train(folder, resume="auto")


def test_check_tells_of_each_file_and_of_the_row_that_is_shown(tmp_path: Path) -> None:
    lines = list(describe(load_config(None, mixture(tmp_path, "classification").overrides(), {}), 21))
    told = [line for line in lines if line.startswith("file ")]
    trained = [int(line.split(": ")[1].split()[0]) for line in told]
    assert sum(trained) == 29
    assert told == [
        f"file a.jsonl: {trained[0]} of 20 rows to train on, weight 0.5, {int(trained[0] / 2 + 0.5)} in an epoch",
        f"file b.jsonl: {trained[1]} of 12 rows to train on, weight 2.25, {int(trained[1] * 2.25 + 0.5)} in an epoch",
    ]
    assert f"{tmp_path / 'b.jsonl'}:2" in lines


def test_the_command_line_and_python_name_files_and_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = mixture(tmp_path, "classification")
    monkeypatch.chdir(tmp_path)
    words = ["train", "--data", "a.jsonl=0.5", "--data", "b.jsonl=2.25", "--backend", "inline", "--run-dir", "run"]
    found = CliRunner().invoke(app, [*words, *(word for each in SMALL for word in ("--set", each))])
    assert found.exit_code == 0, found.output
    assert runs.train(tmp_path / "same") == Exit.OK
    assert outcome(tmp_path / "run") == outcome(tmp_path / "same")
    card = (tmp_path / "run" / "adapter" / "README.md").read_text()
    assert "--data a.jsonl=0.5 --data b.jsonl=2.25" in card
    files = [{"path": tmp_path / "a.jsonl", "weight": 0.5}, {"path": "b.jsonl", "weight": 2.25}]
    there = andon.train(data=files, backend="inline", workers=1, run_dir="python", **sections())
    assert outcome(there.path) == outcome(tmp_path / "same")


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ("[]", "names no file"),
        ("[a.jsonl, a.jsonl]", "names 'a.jsonl' twice"),
        ("[{path: a.jsonl, weight: 0}]", "must be more than 0"),
        ("[{path: a.jsonl, weight: .inf}]", "must be at most 1000"),
        ("[{path: a.jsonl, wieght: 2}]", "unknown key; known here: path, weight"),
        ("[{weight: 2}]", "field required"),
        ("[3]", "must be a section with keys, is 3"),
        ("3", "must be a string, is 3"),
    ],
)
def test_what_is_no_list_of_files_is_refused(given: str, part: str) -> None:
    with pytest.raises(InputError, match=r"^--set data\.train: ") as caught:
        load_config(None, [f"data.train={given}"])
    assert part in str(caught.value)
