"""The files of a run: mistakes in all of them are listed at once, and a validation file is never trained on."""

from __future__ import annotations

from pathlib import Path

import pytest

from andon.cli.results import records
from andon.config.load import load_config, to_yaml
from andon.config.schema import Config
from andon.console.messages import InputError
from andon.data.readers import TextRow
from andon.run.folder import RunFolder
from andon.training.existing import how_to_train_on, taken_over
from andon.training.inference import Prediction
from andon.training.material import prepare
from andon.training.rows import read_rows
from tests.training.runs import SMALL, Runs, summary

ROWS = [f"{colour} {number},{colour}" for number in range(7) for colour in ("red", "green", "blue")]


def table(path: Path, rows: list[str], header: str = "Body,Topic") -> Path:
    path.write_text("\n".join([header, *rows]) + "\n")
    return path


def configured(folder: Path, rows: list[str], *settings: str, **files: Path) -> Config:
    train = table(folder / "train.csv", rows)
    named = [f"data.{key}={path}" for key, path in {"train": train, **files}.items()]
    return load_config(None, [*SMALL, "data.text_column=Body", "data.label_column=Topic", *named, *settings])


def test_mistakes_in_all_files_are_listed_at_once(tmp_path: Path) -> None:
    held = table(tmp_path / "held.csv", ["red one,red", "a,mauve"])
    other = table(tmp_path / "other.csv", ["red one,red"], "Corpus,Topic")
    with pytest.raises(InputError) as refused:
        read_rows(configured(tmp_path, [*ROWS, ",red", "x,"], validation=held, eval=other))
    remedy = "rename the column: --text-column covers the training file too"
    skip = "to skip such rows: --set data.bad_rows=skip"
    train, *rest = [str(problem) for problem in refused.value.problems]
    assert train.startswith(f"{tmp_path}/train.csv:23: Body is empty; to skip")
    assert rest[0].startswith(f"{tmp_path}/train.csv:24: Topic is empty; to skip")
    assert rest[1:] == [
        f"{held}:3: label 'mauve' is unknown; there are 'blue', 'green', 'red'; {skip}",
        f"{other}:1: has no column 'Body'; there are 'Corpus', 'Topic'; {remedy}",
    ]


def test_no_row_is_split_off_with_a_validation_file(tmp_path: Path) -> None:
    held = table(tmp_path / "held.csv", ["red one,red", "sky,blue", "sea,blue"])
    config = configured(tmp_path, ROWS, validation=held)
    material = prepare(config)
    assert {*material.plan.ids} == {*range(len(ROWS))}
    assert material.validation_ids == material.evaluation_ids == (0, 1, 2)
    assert material.validation_task is material.evaluation_task
    assert material.rows.validation is not None
    assert [row.label for row in material.rows.validation.rows] == [2, 0, 0]
    assert len(material.unpacked) == len(ROWS)
    digests = {material.rows.digest, read_rows(configured(tmp_path, ROWS)).digest}
    table(held, ["red one,red", "sky,blue", "sea,red"])
    assert read_rows(config).digest not in digests
    assert len(digests) == 2


def test_a_resume_names_the_settings_that_it_takes_from_the_run(tmp_path: Path) -> None:
    begun = configured(tmp_path, ROWS, "adapter.dropout=0.3", "model.max_length=64", "training.keep=best")
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    folder.config.write_text(to_yaml(begun))
    folder.metrics.write_text("{}\n")
    again = configured(tmp_path, ROWS, "run.resume=auto", "model.max_length=64")
    assert taken_over(again, folder) == "resume: settings taken from the run: adapter.dropout=0.3"


@pytest.mark.parametrize(("kind", "option"), [("lora", "--set adapter.init="), ("none", "--model ")])
def test_more_epochs_start_from_the_weights_of_the_run(tmp_path: Path, kind: str, option: str) -> None:
    words = how_to_train_on(load_config(None, [f"adapter.kind={kind}"]), RunFolder(tmp_path), finished=True)
    assert words == f"; for more epochs start a new run from its weights: {option}{tmp_path}/adapter"


def test_a_labelled_row_says_whether_its_prediction_is_right() -> None:
    texts = [TextRow("a", fields={"Body": "a", "Topic": topic}, named=("Body",)) for topic in ("red", "blue", "")]
    found = records(texts, ["Body", "Topic"], [Prediction("a", "red", 0.5, (0.5, 0.5))] * 3, None, None, "Topic")
    assert [(row["Topic"], row["correct"]) for row in found] == [("red", True), ("blue", False), ("", None)]
    bare = TextRow("a", fields={"Body": "a"}, named=("Body",))
    (only,) = records([bare], ["Body"], [Prediction("a", "red", 0.5, (0.5, 0.5))], None, None, "Topic")
    assert "correct" not in only


def test_a_run_lists_its_rarest_class_and_the_rows_left_out_of_its_scores(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = ["a", "b", "b", "c", "c", "c", "d", "d", "e", "e", "??odd", "f", "f"]
    held = table(tmp_path / "held.csv", ["x 1,a", "x 2,g", ",b", "x 3,h", "x 4,c"])
    train = table(tmp_path / "train.csv", [f"text {place},{kind}" for place, kind in enumerate(["", "a", *kinds])])
    names = ("data.text_column=Body", "data.label_column=Topic", "data.validation_fraction=0", f"data.eval={held}")
    settings = (*names, "data.bad_rows=skip", "training.max_steps=1")
    assert Runs(train).train(tmp_path / "run", *settings) == 0
    said = capsys.readouterr().err
    assert "andon: classes: c 3, a 2, b 2, d 2, e 2 and 2 more, the rarest ??odd 1\n" in said
    (score,) = [line for line in said.splitlines() if "evaluation accuracy" in line and "done: " in line]
    assert score.endswith(" (without 3 unusable rows, see skipped_rows.txt)")
    assert summary(tmp_path / "run")["skipped"] == 3
