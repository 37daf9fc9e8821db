"""What `andon predict` reads and writes: files of every kind in, their order kept, a file out whole or not at all."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from andon.cli.commands import app
from andon.console.problems import InputError
from andon.data.formats import encoded
from tests.cli.command import tree
from tests.training.runs import Runs, write_csv

TEXTS = ["red thing", 'a text\nof "two" lines, with a comma', "blue\rthing", "größe ☃", "\x1b]0;title\x07 green"]


def predicted(*arguments: str | Path, stdin: bytes = b"") -> str:
    ended = CliRunner().invoke(app, ["predict", *map(str, arguments)], input=stdin, catch_exceptions=False)
    assert ended.exit_code == 0, ended.output
    return ended.stdout


def records(*arguments: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in predicted(*arguments).splitlines()]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Texts with numbers of their own, and a column that is none of ours."""
    file = tmp_path / "texts.csv"
    rows = [{"id": f"n{place}", "text": text, "more": place} for place, text in enumerate(TEXTS)]
    file.write_bytes(encoded(file, rows))
    return file


@pytest.mark.parametrize("ending", [".csv", ".tsv", ".jsonl", ".json", ".parquet"])
def test_every_kind_of_file_gives_the_same(run: Path, texts: Path, tmp_path: Path, ending: str) -> None:
    told = records(run, texts)
    assert [(one["id"], one["text"]) for one in told] == [(f"n{place}", text) for place, text in enumerate(TEXTS)]
    other = tmp_path / f"other{ending}"
    other.write_bytes(encoded(other, [{"id": one["id"], "text": one["text"]} for one in told]))
    assert records(run, "--data", other) == told


def test_a_column_of_another_name(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "texts.csv"
    file.write_text("what\nred thing\n")
    with pytest.raises(InputError, match=r"texts\.csv:1: has no column 'input' or 'text'.*--text-column"):
        predicted(run, file)
    assert [one["text"] for one in records(run, file, "--text-column", "what")] == ["red thing"]


def test_all_scores_are_probabilities_of_every_label(run: Path, texts: Path) -> None:
    for one in records(run, texts, "--all-scores"):
        assert list(one["scores"]) == ["blue", "green", "red"]
        assert sum(one["scores"].values()) == pytest.approx(1, abs=2e-6)  # each is rounded to six places
        assert one["scores"][one["label"]] == one["probability"] == max(one["scores"].values())


@pytest.mark.parametrize("ending", [".csv", ".tsv", ".jsonl", ".parquet"])
def test_output_is_what_is_printed(run: Path, texts: Path, tmp_path: Path, ending: str) -> None:
    told = records(run, texts, "--all-scores")
    output = tmp_path / f"out{ending}"
    assert predicted(run, texts, "--all-scores", "--output", output) == f"wrote {output}: {len(TEXTS)} rows\n"
    assert tree(tmp_path) == {"texts.csv", output.name}
    found = read(output)
    assert [(one["id"], one["text"], one["label"]) for one in found] == [
        (one["id"], one["text"], one["label"]) for one in told
    ]
    for one, printed in zip(found, told, strict=True):
        scores = one["scores"] if ending == ".jsonl" else {name: one[f"scores_{name}"] for name in printed["scores"]}
        for name, value in printed["scores"].items():
            assert float(scores[name]) == pytest.approx(value, abs=1e-6)
            assert float(scores[name]) != value  # six places are not all that there are


def read(file: Path) -> list[dict[str, Any]]:
    """A written file, by other means than ours."""
    if file.suffix == ".parquet":
        import pyarrow.parquet

        rows: list[dict[str, Any]] = pyarrow.parquet.read_table(file).to_pylist()
        return rows
    if file.suffix == ".jsonl":
        return [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n")[:-1]]
    with file.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines, delimiter="," if file.suffix == ".csv" else "\t"))


def test_an_output_is_whole_or_not_there(run: Path, texts: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.csv"
    output.write_text("mine")
    with texts.open("a", encoding="utf-8") as file:
        file.write('"n5","  ",5\n')
    with pytest.raises(InputError, match=r"texts\.csv:8: text is only white space"):
        predicted(run, texts, "--output", output)
    before = texts.read_bytes()
    with pytest.raises(InputError, match="is the file that is read"):
        predicted(run, texts, "--output", texts)
    assert (output.read_text(), texts.read_bytes()) == ("mine", before)
    assert tree(tmp_path) == {"texts.csv", "out.csv"}


def test_an_output_that_cannot_be_is_refused_before_anything_is_read(run: Path, tmp_path: Path) -> None:
    for output, what in (
        (tmp_path / "out.xlsx", "unknown kind of file"),
        (tmp_path / "no" / "out.csv", "there is no folder"),
    ):
        with pytest.raises(InputError, match=what):
            predicted(run, tmp_path / "none.csv", "--output", output)
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(InputError, match="is there and is no file"):
        predicted(run, "--output", tmp_path / "folder.csv")
    with pytest.raises(InputError, match="name one file of texts"):
        predicted(run, "a.csv", "--data", "b.csv")


@pytest.mark.parametrize(
    ("first", "warned"),
    [
        ("text,label", True),
        ("id;input", True),
        ('"text"\tlabel', True),
        ('{"text": "red"}', True),
        ("text", False),
        ("a text, and a label", False),
    ],
)
def test_a_table_on_standard_input_is_not_guessed_but_told(run: Path, first: str, warned: bool) -> None:
    ended = CliRunner().invoke(app, ["predict", str(run)], input=f"{first}\nred thing\n", catch_exceptions=False)
    assert [json.loads(line)["text"] for line in ended.stdout.splitlines()] == [first, "red thing"]
    assert (f"andon predict {run} --data FILE.csv" in ended.stderr) == warned == bool(ended.stderr)


def test_a_column_of_standard_input_is_refused(run: Path) -> None:
    with pytest.raises(
        InputError, match=r"--text-column: names a column of a file.* --data FILE\.csv --text-column what"
    ):
        predicted(run, "--text-column", "what", stdin=b"what\nred\n")


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run on a base in a folder, which has gone to `there`; `other` holds another base."""
    folder = tmp_path_factory.mktemp("moved")
    rows = write_csv(folder / "train.csv", range(30))
    runs, columns = Runs(rows), ("data.text_column=sentence", "data.label_column=colour", "training.max_steps=2")
    for name, seed in (("base", "seed=1"), ("other", "seed=2")):
        assert runs.train(folder / f"run-{name}", *columns, seed, "adapter.kind=none") == 0
        shutil.copytree(folder / f"run-{name}" / "adapter", folder / name)
    assert runs.train(folder / "run", *columns, f"model.base={folder / 'base'}") == 0
    before = records(folder / "run", rows)
    (folder / "base").rename(folder / "there")
    (folder / "before.json").write_text(json.dumps(before))
    return folder


def test_a_base_that_has_moved_is_named(moved: Path) -> None:
    rows = moved / "train.csv"
    with pytest.raises(InputError, match=r"base'? is no folder here; if it has moved, name its place: --model PATH"):
        predicted(moved / "run", rows)
    assert records(moved / "run", rows, "--model", moved / "there") == json.loads((moved / "before.json").read_text())
    scored = CliRunner().invoke(app, ["eval", str(moved / "run"), str(rows), "--model", str(moved / "there")])
    assert json.loads(scored.stdout)["rows"] == 30


def test_another_base_is_refused(moved: Path, run: Path) -> None:
    with pytest.raises(InputError, match=r"the base model has digest \w{16}, the adapter was trained on \w{16}"):
        predicted(moved / "run", moved / "train.csv", "--model", moved / "other")
    for folder, why in ((run, "embedded model"), (moved / "run-base", "whole model lies in its folder")):
        with pytest.raises(InputError, match=f"takes no base.*{why}"):
            predicted(folder, moved / "train.csv", "--model", moved / "there", "--text-column", "sentence")
    assert len(records(moved / "run-base", moved / "train.csv")) == 30
