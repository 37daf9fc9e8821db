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
from andon.data.readers import read_texts
from andon.data.rows import frozen_split
from andon.metrics.confusion import digest_of
from andon.run.folder import RunFolder
from andon.training.inference import Prediction, evaluate_run, load_run, named, predict, read_labelled
from andon.training.preview import describe
from andon.training.rows import read_rows
from andon_falsify.claims.ledgers import read_run, verify
from andon_falsify.verdict import Outcome
from tests.support.folders import stopped
from tests.training.kinds import COUNT, IDS, KINDS, Kind, settings, started, tagged, written
from tests.training.runs import SMALL, outcome, records, row, summary

pytestmark = pytest.mark.xdist_group("test_kinds")


@pytest.fixture(scope="module")
def of_kind(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Kind, Path, Path]]:
    """Gives a task, its rows, and the run of one worker that nothing interrupted."""

    @cache
    def made(name: str) -> tuple[Kind, Path, Path]:
        kind = KINDS[IDS.index(name)]
        folder = tmp_path_factory.mktemp(name)
        data = written(folder, kind)
        assert started(kind, data, folder / "run", "inline", 1) == 0
        return kind, data, folder / "run"

    return made


@pytest.fixture(params=IDS)
def whole(request: pytest.FixtureRequest, of_kind: Callable[[str], tuple[Kind, Path, Path]]) -> tuple[Kind, Path, Path]:
    """A task, its rows, and its run."""
    return of_kind(request.param)


def test_a_resumed_run_ends_with_the_same_bits(whole: tuple[Kind, Path, Path], tmp_path: Path) -> None:
    kind, data, alone = whole
    folder = stopped([*settings(kind, data), f"task={kind.task}"], tmp_path / "run", 5)
    assert started(kind, data, folder, "threads", 3, "auto") == 0
    assert outcome(folder) == outcome(alone)
    assert {verdict.outcome for verdict in verify([read_run(alone), read_run(folder)])} <= {
        Outcome.HOLDS,
        Outcome.NOT_APPLICABLE,
    }


def test_the_task_is_in_the_ledger_and_in_the_configuration(whole: tuple[Kind, Path, Path]) -> None:
    kind, _, folder = whole
    (start,) = records(folder, "start")
    assert start.plan.task == kind.task
    assert load_config(folder / "config.yaml").task == kind.task


def test_what_is_right_is_counted_where_a_term_is_right_or_wrong(whole: tuple[Kind, Path, Path]) -> None:
    """A number is never right: its ledger has no count of 0 that would read as one of faults."""
    kind, _, folder = whole
    counted = {step.correct is not None for step in records(folder, "step")}
    assert counted == {kind.task != "regression"}


def test_check_says_what_is_learned(whole: tuple[Kind, Path, Path]) -> None:
    kind, data, _ = whole
    lines = list(describe(load_config(None, [*settings(kind, data), "run.backend=inline"])))
    assert any(line.startswith("data: ") and line.endswith(f"; {kind.about}") for line in lines)
    told = [line for line in lines if line.startswith("task: ")]
    assert told == ([f"task: {kind.task}, as {kind.found} in {data} (another: --task NAME)"] if kind.found else [])


def test_a_run_scores_its_own_validation_rows_as_its_summary_has_them(
    whole: tuple[Kind, Path, Path], tmp_path: Path
) -> None:
    _, data, folder = whole
    held = {*read_rows(load_config(folder / "config.yaml")).validation_ids}
    lines = data.read_text().splitlines(keepends=True)
    again = tmp_path / "held.jsonl"
    again.write_text("".join(line for place, line in enumerate(lines) if place in held))
    rows = read_labelled(RunFolder(folder), again)
    found = evaluate_run(load_run(RunFolder(folder)), rows)
    values = json.loads(json.dumps(found.as_dict()))
    if found.confusion is not None:  # the summary quotes its file
        values["confusion"] = digest_of(found.confusion)
    assert values == summary(folder)["eval"]
    assert named(found, rows.labels)["rows"] == len(held)


def test_predictions_are_numbers_in_the_unit_of_the_targets(of_kind: Callable[[str], tuple[Kind, Path, Path]]) -> None:
    _, _, folder = of_kind("regression")
    (first, second) = predict(load_run(RunFolder(folder)), ["red thing", "blue"])
    assert [*first.record(None, lambda value: value)] == ["text", "value"]
    assert 0 < first.record(None, float)["value"] < 6
    assert first != second


def test_a_run_of_pairs_is_asked_with_pairs(of_kind: Callable[[str], tuple[Kind, Path, Path]]) -> None:
    _, _, folder = of_kind("pairs")
    run = load_run(RunFolder(folder))
    first, second = predict(run, ["red", "red"], pairs=["a red thing", "b"])
    assert isinstance(first, Prediction)
    assert isinstance(second, Prediction)
    assert first.probability != second.probability
    with pytest.raises(InputError, match="has learned from pairs, with a second text in 'about'"):
        list(predict(run, ["red"]))


def test_labels_above_a_half_are_told_with_their_scores(of_kind: Callable[[str], tuple[Kind, Path, Path]]) -> None:
    """Those and no others, unless all scores are asked for."""
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


def test_each_word_is_told_with_a_tag(of_kind: Callable[[str], tuple[Kind, Path, Path]]) -> None:
    _, data, folder = of_kind("token-classification")
    run = load_run(RunFolder(folder))
    texts = read_texts(data, words=True).texts
    assert texts[0].split() == tagged(0)["tokens"]
    for text, found in zip(texts, predict(run, texts), strict=True):
        record = found.record(None, float)
        assert record["tokens"] == text.split()
        assert len(record["tags"]) == len(record["tokens"])
        assert {*record["tags"]} <= {*run.labels}
