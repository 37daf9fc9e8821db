"""Every task as a whole run: found in the data, the same bits wherever it is done, resumed, scored and asked again."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from andon.cli.train import run_training
from andon.config.load import load_config
from andon.console.problems import InputError
from andon.data.rows import frozen_split
from andon.metrics.confusion import digest_of
from andon.run.folder import RunFolder
from andon.training.inference import Prediction, evaluate_run, load_run, named, predict, read_labelled
from andon.training.preview import describe
from andon.training.rows import read_rows
from andon_falsify.claims.ledgers import read_run, verify
from andon_falsify.verdict import Outcome
from tests.support.folders import stopped
from tests.training.kinds import COUNT, IDS, KINDS, Kind
from tests.training.runs import SMALL, Runs, outcome, records, row, summary

pytestmark = pytest.mark.xdist_group("test_kinds")


Made = tuple[Kind, Runs, Path]
"""A task, what starts runs of it, and the run of one worker that nothing interrupted."""


@pytest.fixture(scope="module")
def of_kind(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    @cache
    def made(name: str) -> Made:
        kind, folder = KINDS[IDS.index(name)], tmp_path_factory.mktemp(name)
        runs = kind.written(folder)
        assert runs.train(folder / "run") == 0
        return kind, runs, folder / "run"

    return made


@pytest.fixture(params=IDS)
def whole(request: pytest.FixtureRequest, of_kind: Callable[[str], Made]) -> Made:
    return of_kind(request.param)


def test_a_resumed_run_ends_with_the_same_bits(whole: Made, tmp_path: Path) -> None:
    kind, runs, alone = whole
    folder = stopped(runs.overrides(f"task={kind.task}"), tmp_path / "run", 5)
    assert runs.train(folder, backend="threads", workers=3, resume="auto") == 0
    assert outcome(folder) == outcome(alone)
    told = {verdict.outcome for verdict in verify([read_run(alone), read_run(folder)])}
    assert told <= {Outcome.HOLDS, Outcome.NOT_APPLICABLE}


def test_the_task_is_recorded_and_what_is_right_is_counted(whole: Made) -> None:
    """A number is never right: its ledger has no count of 0 that would read as one of faults."""
    kind, _, folder = whole
    (start,) = records(folder, "start")
    assert start.plan.task == load_config(folder / "config.yaml").task == kind.task
    assert {step.correct is not None for step in records(folder, "step")} == {kind.task != "regression"}


def test_check_says_what_is_learned(whole: Made) -> None:
    kind, runs, _ = whole
    lines = list(describe(load_config(None, runs.overrides("run.backend=inline"))))
    assert any(line.startswith("data: ") and line.endswith(f"; {kind.about}") for line in lines)
    told = [line for line in lines if line.startswith("task: ")]
    assert told == ([f"task: {kind.task}, as {kind.found} in {runs.data} (another: --task NAME)"] if kind.found else [])


def test_a_run_scores_its_own_validation_rows_as_its_summary_has_them(whole: Made, tmp_path: Path) -> None:
    _, runs, folder = whole
    held = {*read_rows(load_config(folder / "config.yaml")).validation_ids}
    lines = runs.data.read_text().splitlines(keepends=True)
    again = tmp_path / "held.jsonl"
    again.write_text("".join(line for place, line in enumerate(lines) if place in held))
    rows = read_labelled(RunFolder(folder), again)
    found = evaluate_run(load_run(RunFolder(folder)), rows)
    values = json.loads(json.dumps(found.as_dict()))
    if found.confusion is not None:  # the summary quotes its file
        values["confusion"] = digest_of(found.confusion)
    assert values == summary(folder)["eval"]
    assert named(found, rows.labels)["rows"] == len(held)


def test_a_run_of_pairs_is_asked_with_pairs(of_kind: Callable[[str], Made]) -> None:
    _, _, folder = of_kind("pairs")
    run = load_run(RunFolder(folder))
    first, second = predict(run, ["red", "red"], pairs=["a red thing", "b"])
    assert isinstance(first, Prediction)
    assert isinstance(second, Prediction)
    assert first.probability != second.probability
    with pytest.raises(InputError, match="has learned from pairs, with a second text in 'about'"):
        list(predict(run, ["red"]))


def test_labels_above_a_half_are_told_with_their_scores(of_kind: Callable[[str], Made]) -> None:
    _, _, folder = of_kind("multi-label")
    run = load_run(RunFolder(folder))
    for found in predict(run, ["red thing number 1", "a blue thing number 30"]):
        few, all_ = found.record(None, float), found.record(run.labels, float)
        assert [*all_["scores"]] == ["blue", "green", "long", "red"]
        assert few["labels"] == [name for name, score in all_["scores"].items() if score > 0.5]
        assert few["scores"] == {name: all_["scores"][name] for name in few["labels"]}


def test_joined_labels_are_one_class_and_it_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "rows.csv"
    data.write_text("text,label\n" + "".join(f"{row(place)[0]},{row(place)[1]};thing\n" for place in range(COUNT)))
    told = "note: most labels hold ';', and each is taken as one class"
    config = [*SMALL, f"data.train={data}", "run.backend=inline"]
    lines = list(describe(load_config(None, config)))
    assert any(line.startswith(told) for line in lines)
    assert any(line.endswith("; 3 classes") for line in lines)
    named = list(describe(load_config(None, [*config, "data.label_separator=;"])))
    assert f"task: multi-label, as labels are joined with ';' in {data} (another: --task NAME)" in named
    assert any(line.endswith("; 4 labels, 2.00 of them a row") for line in named)
    assert not any(line.startswith("note: most labels") for line in named)
    assert run_training(None, [*config, "training.max_steps=1"], {"run.dir": str(tmp_path / "run")}) == 0
    assert told in capsys.readouterr().err


def test_classes_are_listed_and_doubtful_ones_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, held = tmp_path / "rows.csv", tmp_path / "eval.csv"
    rows = [f"word {place},{('pos', 'neg', 'POS')[place % 3]}" for place in range(30)]
    _, validation = frozen_split(len(rows) + 1, 0.1, 42)
    rows.insert(validation[0], '"the only\none",urgent')
    data.write_text("text,label\n" + "\n".join(rows) + "\n")
    held.write_text(f"text,label\nshort,pos\n{'long ' * 40},neg\n")
    config = [*SMALL, f"data.train={data}", f"data.eval={held}", "data.validation_fraction=0.1", "model.max_length=64"]
    lines = list(describe(load_config(None, [*config, "run.backend=inline"])))
    trained = [line.rpartition(",")[2] for place, line in enumerate(rows) if place not in validation]
    counted = ", ".join(f"{name} {trained.count(name)}" for name in ("POS", "neg", "pos", "urgent"))
    assert f"classes: {counted}" in lines
    told = [
        (
            "warning: 'POS', 'pos' are classes of their own, and differ only in case, white space or Unicode form; "
            "if they mean the same, write them alike"
        ),
        "warning: no training row has the class 'urgent'; all its rows are held back for validation",
        f"note: 1 texts span several lines (first: {data}:{validation[0] + 2}); is a quote left open there?",
        "note: 1 of 2 evaluation rows are cut to 64 tokens",
    ]
    assert [line for line in told if line not in lines] == []
    given = [*config, "run.backend=inline", "training.max_steps=1"]
    assert run_training(None, given, {"run.dir": str(tmp_path / "run")}) == 0
    said = capsys.readouterr().err
    assert [line for line in told if line not in said] == []
