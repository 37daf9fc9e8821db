"""Every task as a whole run: found in the data, the same bits wherever it is done, resumed, scored and asked again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForSequenceClassification

from andon.backend.base import InlineBackend
from andon.cli.train import run_training
from andon.config.load import load_config
from andon.config.schema import MULTI_LABEL, REGRESSION, TOKEN_CLASSIFICATION, Config, Model
from andon.config.source import quiet_loading
from andon.console.messages import InputError
from andon.data.rows import frozen_split
from andon.data.tokens import byte_tokenizer
from andon.metrics.scores import digest_of
from andon.model.adapter import save_base, trainable_parameters
from andon.run.folder import RunFolder
from andon.run.summary import with_labels
from andon.training.build import build_model, build_replicas
from andon.training.inference import PredictedTags, Prediction, evaluate_run, load_run, predict, read_labelled, rows_of
from andon.training.material import prepare
from andon.training.preview import describe
from andon.training.rows import read_rows
from andon_falsify.claims.ledgers import read_run, verify
from andon_falsify.verdict import Outcome
from tests.model.tiny import CPU, LABELS, TINY, base_of, changed, task
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
    folder = runs.stopped(tmp_path / "run", 5, f"task={kind.task}")
    assert runs.train(folder, workers=3, resume="auto") == 0
    assert outcome(folder) == outcome(alone)
    told = {verdict.outcome for verdict in verify([read_run(alone), read_run(folder)])}
    assert told <= {Outcome.HOLDS, Outcome.NOT_APPLICABLE}


@pytest.mark.parametrize("task", [REGRESSION, MULTI_LABEL, TOKEN_CLASSIFICATION])
def test_a_task_without_rows_names_a_small_file_that_it_learns_from(task: str, tmp_path: Path) -> None:
    missing = rf"data\.train: task {task} needs rows: name a file with --data; an example is (\S+)"
    with pytest.raises(InputError, match=missing) as caught:
        run_training(None, [*SMALL, f"task={task}"], {"run.dir": str(tmp_path / "run")})
    assert not (tmp_path / "run").exists()
    example = Path(__file__).parents[2] / str(caught.value).rpartition("example is ")[2]
    assert Runs(example, (f"task={task}",)).train(tmp_path / "run", "training.max_steps=1") == 0


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
    assert with_labels(values, rows.labels) == summary(folder)["eval"]
    assert found.rows == len(held)


def test_a_run_of_pairs_is_asked_with_pairs(of_kind: Callable[[str], Made]) -> None:
    _, _, folder = of_kind("pairs")
    run = load_run(RunFolder(folder))
    first, second = predict(run, ["red", "red"], pairs=["a red thing", "b"])
    assert isinstance(first, Prediction)
    assert isinstance(second, Prediction)
    assert first.probability != second.probability
    with pytest.raises(InputError, match="was trained on pairs, with a second text in 'about'"):
        list(predict(run, ["red"]))


def test_a_text_that_is_cut_counts_once(of_kind: Callable[[str], Made]) -> None:
    _, _, folder = of_kind(TOKEN_CLASSIFICATION)
    run = load_run(RunFolder(folder))
    long, short = predict(run, ["red " * 1000, "a red thing"])
    assert isinstance(long, PredictedTags)
    assert isinstance(short, PredictedTags)
    assert (len(long.tags), long.tags[-1], len(short.tags)) == (1000, None, 3)
    assert run.tokenizer.truncated == 1


def test_labels_above_a_half_are_told_and_the_scores_of_all(of_kind: Callable[[str], Made]) -> None:
    _, _, folder = of_kind("multi-label")
    run = load_run(RunFolder(folder))
    for found in predict(run, ["red thing number 1", "a blue thing number 30"]):
        told = found.record(None, float)
        assert [*told["scores"]] == ["blue", "green", "long", "red"]
        assert told["labels"] == [name for name, score in told["scores"].items() if score > 0.5]


def test_joined_labels_are_one_class_unless_the_separator_is_named(tmp_path: Path) -> None:
    data = tmp_path / "rows.csv"
    data.write_text("text,label\n" + "".join(f"{row(place)[0]},{row(place)[1]};thing\n" for place in range(COUNT)))
    config = [*SMALL, f"data.train={data}", "run.backend=inline"]
    lines = list(describe(load_config(None, config)))
    assert any(line.endswith("; 3 classes") for line in lines)
    named = list(describe(load_config(None, [*config, "data.label_separator=;"])))
    assert f"task: multi-label, as labels are joined with ';' in {data} (another: --task NAME)" in named
    assert any(line.endswith("; 4 labels, 2.00 of them a row") for line in named)


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
    by_count = sorted(("POS", "neg", "pos", "urgent"), key=lambda name: -trained.count(name))
    counted = ", ".join(f"{name} {trained.count(name)}" for name in by_count)
    assert f"classes: {counted}" in lines
    told = [
        (
            "warning: 'POS', 'pos' are classes of their own, and differ only in case, white space or Unicode form; "
            "if they mean the same, spell them in one way"
        ),
        "warning: no training row has the class 'urgent'; all its rows are validation rows",
        f"note: 1 text with line breaks (first: {data}:{validation[0] + 2}); is a quote left open there?",
        "note: 1 of 2 scored rows cut to 64 tokens",
    ]
    assert [line for line in told if line not in lines] == []
    given = [*config, "run.backend=inline", "training.max_steps=1"]
    assert run_training(None, given, {"run.dir": str(tmp_path / "run")}) == 0
    said = capsys.readouterr().err
    assert [line for line in told if "line breaks" not in line and line not in said] == []


# What is put together below the configuration, and what a run takes over from its base

ROWS = task([[1, 2, 3], [4, 5]], [0, 1])
UPDATE = Config(seed=5)


@pytest.mark.parametrize("own_base", [False, True])
def test_replicas_on_one_device_share_what_is_frozen_or_have_their_own(own_base: bool) -> None:
    model = build_model(Config(model=TINY.model), TINY.interface)
    first, second = build_replicas(model, UPDATE, InlineBackend([CPU, CPU]), ROWS, 0, own_base=own_base)
    assert (first.weights_digest(), first.base_digest()) == (second.weights_digest(), second.base_digest())
    trained, others = trainable_parameters(first.model), dict(second.model.named_parameters())
    shared = {
        name: parameter.data_ptr() == others[name].data_ptr() for name, parameter in first.model.named_parameters()
    }
    assert {shared[name] for name in trained} == {False}
    assert {same for name, same in shared.items() if name not in trained} == {not own_base}


def test_a_model_whose_own_code_fails_on_a_row_is_no_error_of_ours(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    config = AutoConfig.for_model("nystromformer", vocab_size=33, num_landmarks=12, segment_means_seq_len=48, **sizes)
    with quiet_loading():
        AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    model = build_model(Config(model=Model(base=str(tmp_path))), TINY.interface)
    with pytest.raises(InputError, match=r"model\.base: Nystromformer\w+ fails on a row .* \(RuntimeError: shape"):
        build_replicas(model, UPDATE, InlineBackend([CPU]), ROWS, 0)


COLOUR = Kind("classification", lambda place: dict(zip(("text", "label"), row(place), strict=True)), "3 classes", "x")
OF_CLASSES = [COLOUR, *(kind for kind in KINDS if kind.task in (MULTI_LABEL, TOKEN_CLASSIFICATION))]


def turned(folder: Path, target: Path) -> tuple[str, ...]:
    """The same model with its classes numbered the other way round. Returns their names in the new order."""
    shutil.copytree(folder, target)
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if name.startswith(("score.", "classifier.")):
            tensors[name] = tensors[name].flip(0).contiguous()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    names = tuple(config["id2label"][str(number)] for number in reversed(range(len(config["id2label"]))))
    config |= {"id2label": dict(enumerate(names)), "label2id": {name: number for number, name in enumerate(names)}}
    (target / "config.json").write_text(json.dumps(config))
    return names


@pytest.mark.parametrize("kind", OF_CLASSES, ids=[kind.task for kind in OF_CLASSES])
def test_an_untrained_run_scores_as_its_base(kind: Kind, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The classes of the base are not in alphabetical order. At a learning rate of almost 0 it keeps its scores."""
    runs = kind.written(tmp_path)
    assert runs.train(tmp_path / "first", "optimizer.lr=0.05", "adapter.kind=none") == 0
    names = turned(tmp_path / "first" / "adapter", tmp_path / "base")
    assert names != tuple(sorted(names))
    still = ("optimizer.lr=1e-9", "schedule.min_lr=0", f"model.base={tmp_path / 'base'}", "training.max_steps=1")
    capsys.readouterr()
    assert runs.train(tmp_path / "second", *still) == 0
    assert f"numbered as there: {', '.join(names)}" in capsys.readouterr().err
    first, second = (summary(tmp_path / name)["eval"] for name in ("first", "second"))
    assert second["loss"] == pytest.approx(first["loss"], abs=1e-5)
    assert json.loads((tmp_path / "second" / "adapter" / "labels.json").read_text())["labels"] == list(names)
    material = prepare(load_config(None, runs.overrides(*still), {}))
    assert material.labels == names
    assert material.rows.digest == read_rows(material.config).digest
    again = rows_of(load_run(RunFolder(tmp_path / "second")))
    assert again is not None
    assert again.train == material.rows.train


def test_code_that_a_base_names_is_said_by_every_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = tmp_path / "base"
    save_base(base_of(changed(TINY, vocab_size=260, pad_id=0, max_length=128)), base, LABELS)
    byte_tokenizer().save(base)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModel": "own.Model"}}))
    runs, more = COLOUR.written(tmp_path), (f"model.base={base}", "training.max_steps=1")
    warning = "warning: the base's config.json names custom code (own.Model), which Andon does not run"
    assert runs.train(tmp_path / "run", *more) == 0
    assert warning in capsys.readouterr().err
    assert any(line.startswith(warning) for line in describe(load_config(None, runs.overrides(*more), {})))
    load_run(RunFolder(tmp_path / "run"))
    assert warning in capsys.readouterr().err
    card = (tmp_path / "run" / "adapter" / "README.md").read_text()
    assert "The base's config.json names custom code (own.Model), which Andon does not run" in card
