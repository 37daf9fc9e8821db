"""What `andon export` writes is read by transformers and peft alone, in processes that know nothing of Andon."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

from andon.cli.commands import app
from andon.config.schema import Config
from andon.console.problems import InputError
from andon.metrics.confusion import Confusion, read_confusion
from andon.model import adapter
from andon.run.folder import RunFolder
from andon.run.provenance import Provenance
from andon.training import export
from andon.training.card import Form, Result, card
from andon.training.inference import load_run, predict
from tests.cli.command import PATIENCE_S, andon, tree
from tests.training.runs import Runs, outcome, row, summary, write_csv, write_jsonl

TEXTS = [*(row(number)[0] for number in range(6)), "größe ☃ " * 40, "two\nlines"]
"""The seventh is longer than the 128 tokens at which a run cuts."""
COLUMNS = ("data.text_column=sentence", "data.label_column=colour")
KINDS = ("embedded", "pretrained", "whole")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs: on the embedded decoder; of two classes on an encoder in `base` with a head of three; of an encoder
    with every weight trained. Weights have moved far enough that a base without its adapter gives something else."""
    folder = tmp_path_factory.mktemp("made")
    three, two = Runs(write_jsonl(folder / "train.jsonl")), Runs(write_csv(folder / "two.csv", range(30)))
    held = write_jsonl(folder / "test.jsonl", 12)
    assert three.train(folder / "embedded", f"data.eval={held}", "optimizer.lr=0.05") == 0
    assert three.train(folder / "whole", "model.architecture=encoder", "adapter.kind=none") == 0
    shutil.copytree(folder / "whole" / "adapter", folder / "base")
    assert two.train(folder / "pretrained", *COLUMNS, f"model.base={folder / 'base'}", "optimizer.lr=0.05") == 0
    return folder


def exported(run: Path, target: Path, *options: str | Path) -> list[str]:
    """What `andon export` prints. Raises what it ends with."""
    ended = CliRunner().invoke(app, ["export", *map(str, (run, target, *options))], catch_exceptions=False)
    assert ended.exit_code == 0, ended.output
    return ended.stdout.splitlines()


def used(folder: Path, elsewhere: Path, texts: list[str] = TEXTS) -> list[dict[str, float]]:
    """Probabilities by class of each text, by the code that the card in `folder` shows, in a process of its own."""
    found = re.search(r"## Use\n\n((?:    .*\n|\n)+)", (folder / "README.md").read_text())
    assert found is not None
    code = re.sub("^    ", "", found[1], flags=re.MULTILINE)
    program = code.replace("THIS FOLDER", str(folder)).replace('["a text"]', repr(texts))
    return [{one["label"]: one["score"] for one in each} for each in ast.literal_eval(alone(program, elsewhere))]


def alone(program: str, elsewhere: Path) -> str:
    """What a program prints last, run offline in the folder `elsewhere` where Andon is not to be found."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    hidden = "import sys; sys.modules['andon'] = None\n"
    done = subprocess.run(
        [sys.executable, "-c", hidden + program],
        cwd=elsewhere,
        env={**environment, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def ours(run: Path) -> list[dict[str, float]]:
    """The same by the run itself."""
    trained = load_run(RunFolder(run))
    return [dict(zip(trained.labels, one.probabilities, strict=True)) for one in predict(trained, TEXTS)]


def same(found: list[dict[str, float]], wanted: list[dict[str, float]], within: float = 1e-6) -> None:
    """One class's probability may differ by rounding alone."""
    for one, other in zip(found, wanted, strict=True):
        assert one == pytest.approx(other, abs=within)


@pytest.mark.parametrize("kind", KINDS)
def test_stock_transformers_gives_the_runs_probabilities(made: Path, tmp_path: Path, kind: str) -> None:
    """One folder and the code of its card: names of classes, cuts of long texts and probabilities are the run's."""
    said = exported(made / kind, tmp_path / "out", "--merge")
    assert said[0] == f"wrote {tmp_path / 'out'}: a model of transformers in float32"
    assert "and 0 rows get another label" in said[1]
    assert not (tmp_path / "out" / "adapter_config.json").exists()
    same(used(tmp_path / "out", tmp_path), ours(made / kind))


@pytest.mark.parametrize("kind", KINDS)
def test_an_unmerged_export_gives_them_too(made: Path, tmp_path: Path, kind: str) -> None:
    """By the code of its card: on the embedded base from the folder alone, on another with the classes' names."""
    exported(made / kind, tmp_path / "out")
    same(used(tmp_path / "out", tmp_path), ours(made / kind))
    same(used(made / kind / "adapter", tmp_path), ours(made / kind))


def test_a_run_folder_may_be_moved(made: Path, tmp_path: Path) -> None:
    """With its embedded base: for us, for transformers, and for peft, which is given the base's folder beside it; no
    path in the adapter's configuration says where it was."""
    before = ours(made / "embedded")
    moved = tmp_path / "elsewhere" / "run"
    shutil.copytree(made / "embedded", moved)
    (made / "embedded").rename(made / "gone")
    try:
        same(ours(moved), before, within=0)
        same(used(moved / "adapter", tmp_path), before)
        for base, folder in ((moved / "base", moved / "adapter"), (tmp_path / "out" / "base", tmp_path / "out")):
            if not folder.exists():
                exported(moved, folder)
            reference = json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
            assert (folder / reference).resolve() == base
            assert not Path(reference).is_absolute()
            same(with_peft(base, folder, tmp_path), before)
    finally:
        (made / "gone").rename(made / "embedded")


def with_peft(base: Path, folder: Path, elsewhere: Path) -> list[dict[str, float]]:
    """Probabilities by peft's own loader, one text at a time."""
    program = f"""
import torch
from peft import PeftModel
from transformers import AutoModelForSequenceClassification, AutoTokenizer
base = AutoModelForSequenceClassification.from_pretrained({str(base)!r})
model = PeftModel.from_pretrained(base, {str(folder)!r}).eval()
tokenizer = AutoTokenizer.from_pretrained({str(folder)!r})
found = []
for text in {TEXTS!r}:
    with torch.no_grad():
        logits = model(**tokenizer(text, truncation=True, return_tensors="pt")).logits[0]
    found.append({{model.config.id2label[place]: value for place, value in enumerate(logits.softmax(0).tolist())}})
print(found)
"""
    found: list[dict[str, float]] = ast.literal_eval(alone(program, elsewhere))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_lost_in_bfloat16_is_said(made: Path, tmp_path: Path, kind: str) -> None:
    """Every weight is in it, and the drift that is printed, and stands in the card, is the one that others see."""
    _, said = exported(made / kind, tmp_path / "out", "--merge", "--dtype", "bfloat16")
    out = tmp_path / "out"
    assert {each.dtype for each in load_file(out / "model.safetensors").values()} == {torch.bfloat16}
    assert said in " ".join((out / "README.md").read_text().split())
    trained = load_run(RunFolder(made / kind))
    rows = export.rows_of(trained)
    assert rows is not None
    texts = list(rows.evaluated_on.texts())
    wanted = [one.probabilities for one in predict(trained, texts)]
    stock = [tuple(one[name] for name in trained.labels) for one in used(out, tmp_path, texts)]
    largest = max(abs(a - b) for one, other in zip(wanted, stock, strict=True) for a, b in zip(one, other, strict=True))
    told = re.search(
        r"on (\d+) evaluation rows the largest difference from a probability of the run is (\S+), and (\d+) rows", said
    )
    assert told is not None
    assert (int(told[1]), float(told[2])) == (len(texts), pytest.approx(largest, rel=0.2, abs=1e-6))
    assert float(told[2]) > 1e-5


def test_a_wrong_merge_does_not_go_out(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter that is merged at half its scale gives other probabilities: refused, and nothing is left."""

    def halved(model: nn.Module) -> nn.Module:
        for module in model.modules():
            if isinstance(getattr(module, "scaling", None), dict):
                module.scaling = {name: value / 2 for name, value in module.scaling.items()}  # type: ignore[union-attr]
        return adapter.merged(model)

    monkeypatch.setattr(export, "merged", halved)
    with pytest.raises(RuntimeError, match="the written model is not the run's: on 12 evaluation rows"):
        exported(made / "embedded", tmp_path / "out", "--merge")
    assert tree(tmp_path) == set()


def test_an_adapter_that_stock_peft_reads_otherwise_does_not_go_out(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder says half of its scale: refused, and nothing is left."""
    written = adapter._adapter_config

    def halved(model: Any, reference: str) -> dict[str, Any]:
        config = written(model, reference)
        return config | {"lora_alpha": config["lora_alpha"] / 2}

    monkeypatch.setattr(adapter, "_adapter_config", halved)
    for kind in ("embedded", "pretrained"):
        with pytest.raises(RuntimeError, match="the written model is not the run's: on "):
            exported(made / kind, tmp_path / "out")
        assert tree(tmp_path) == set()


def test_a_base_that_has_moved_is_named(made: Path, tmp_path: Path) -> None:
    """Without it nothing is written; with it the model is, and an adapter says where its base is now."""
    before, there = ours(made / "pretrained"), made / "there"
    (made / "base").rename(there)
    try:
        with pytest.raises(InputError, match="if it has moved, name its place: --model PATH"):
            exported(made / "pretrained", tmp_path / "out", "--merge")
        exported(made / "pretrained", tmp_path / "out", "--merge", "--model", there)
        exported(made / "pretrained", tmp_path / "adapter", "--model", there)
        for name in ("out", "adapter"):
            same(used(tmp_path / name, tmp_path), before)
    finally:
        there.rename(made / "base")


def test_an_export_whose_rows_are_gone_says_what_it_did_not_measure(made: Path, tmp_path: Path) -> None:
    """It is written all the same; the run's own record has what the card tells."""
    copy = tmp_path / "run"
    shutil.copytree(made / "embedded", copy)
    config = copy / "config.yaml"
    config.write_text(config.read_text().replace(str(made / "train.jsonl"), str(tmp_path / "gone.jsonl")))
    assert exported(copy, tmp_path / "out", "--merge")[1] == export.NOT_MEASURED
    assert export.NOT_MEASURED in (tmp_path / "out" / "README.md").read_text()


def test_what_cannot_be_exported_is_refused_and_leaves_nothing(made: Path, tmp_path: Path) -> None:
    """A place that is taken, none to make it in, a type that is none or is for whole models, a run that goes on."""
    taken = tmp_path / "taken"
    taken.mkdir()
    for target, options, what in (
        (taken, (), "is there already"),
        (tmp_path / "no" / "out", ("--merge",), "there is no folder"),
        (tmp_path / "out", ("--dtype", "bfloat16"), "is for --merge"),
        (tmp_path / "out", ("--merge", "--dtype", "float8"), "is not one of float32, bfloat16"),
    ):
        with pytest.raises(InputError, match=what):
            exported(made / "embedded", target, *options)
    copy = shutil.copytree(made / "embedded", tmp_path / "run")
    (copy / "summary.json").write_text(json.dumps(summary(copy) | {"finished": False}))
    with pytest.raises(InputError, match="is not finished; go on with it: andon train"):
        exported(copy, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"taken", "run"}


def test_a_disk_that_refuses_leaves_nothing(made: Path, tmp_path: Path) -> None:
    """One line and 2, and no part of a folder."""
    ended = andon("export", made / "embedded", tmp_path / "out", "--merge", largest_file=8000)
    assert (ended.code, ended.out) == (2, [])
    assert "the file would be larger than the limit" in ended.said[-1]
    assert tree(tmp_path) == set()


@pytest.mark.parametrize("kind", KINDS)
def test_the_card_tells_the_runs_record(made: Path, tmp_path: Path, kind: str) -> None:
    """The hub's own reader takes its header, with the summary's scores; no path of this machine stands in it."""
    exported(made / kind, tmp_path / "out", "--merge")
    text, found = (tmp_path / "out" / "README.md").read_text(), summary(made / kind)
    data = ModelCard(text).data
    header = data.to_dict()
    assert (header["pipeline_tag"], header["library_name"]) == ("text-classification", "transformers")
    assert "base_model" not in header
    told = {one.metric_type: one.metric_value for one in data.eval_results or ()}
    scores = {"accuracy": "accuracy", "f1": "macro_f1", "matthews_correlation": "mcc", "roc_auc": "auroc"}
    assert told == {type_: found["eval"][key] for type_, key in scores.items() if found["eval"][key] is not None}
    matrix = read_confusion(made / kind / "confusion", found["eval"]["confusion"]).table()
    right = sum(line[place] for place, line in enumerate(matrix))
    assert f"| {right} of {found['eval']['rows']} rows |" in text
    assert f"`{found['weights_digest']}`, on 1 inline workers" in text
    assert str(made) not in text
    assert str(tmp_path) not in text
    assert str(made) not in (made / kind / "adapter" / "README.md").read_text()


def test_the_cards_command_gives_the_same_weights(made: Path, tmp_path: Path) -> None:
    """Typed as it stands, in a folder with the rows and the base."""
    text = (made / "pretrained" / "adapter" / "README.md").read_text()
    command = next(line.strip() for line in text.splitlines() if line.startswith("    andon train "))
    shutil.copy(made / "two.csv", tmp_path)
    shutil.copytree(made / "base", tmp_path / "base")
    ended = andon(*shlex.split(command)[1:], "--run-dir", "again", folder=tmp_path)
    assert ended.code == 0, ended.said
    assert outcome(tmp_path / "again") == outcome(made / "pretrained")


def test_names_of_others_are_but_names_in_a_card() -> None:
    """Marks of Markdown, of YAML and of a terminal in the names of classes and files begin nothing of their own."""
    names = ("a|b", "`c`", "<script>", "\x1b]0;x\x07", "---\nlicense: mine", "**f**")
    found = {"rows": 6, "accuracy": 0.5, "classes": []}
    matrix = Confusion(6, tuple((i, j, 1) for i in range(6) for j in range(6)))
    result = Result(names, 7, 2, found, "held-out", "0" * 16, 1, "inline", matrix)
    digests = {"data": "d" * 64, "base": "b" * 16, "initial_weights": "i" * 16}
    config = Config.model_validate({"data": {"train": "x\nlicense: mine.csv"}})
    text = card(config, Provenance(Path("p"), digests, {}), result, Form.WHOLE, "# <b>\nlicense: x")
    data: dict[str, Any] = ModelCard(text).data.to_dict()
    assert "license" not in data
    lines = text.splitlines()
    assert not any(mark in text for mark in "\x1b\x07")
    assert not any(line.startswith("license") for line in lines)
    assert sum(line == "---" for line in lines) == 2
    rows = [line.replace("\\|", "") for line in lines if line.startswith("| `") and "held" not in line]
    assert {row.count("|") for row in rows if row.count("|") > 3} == {len(names) + 2}
    assert "# \\# \\<b\\>\\\\nlicense: x" in text
