"""What is put together below the configuration, and what a run takes over from its base."""

from __future__ import annotations

import dataclasses
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForSequenceClassification

from andon.backend.inprocess import InlineBackend
from andon.config.load import load_config
from andon.config.schema import MULTI_LABEL, TOKEN_CLASSIFICATION
from andon.config.source import quiet_loading
from andon.console.problems import InputError
from andon.data.tokens import byte_tokenizer
from andon.model.adapter import AdapterSpec, save_base, trainable_parameters
from andon.model.build import build_base
from andon.run.folder import RunFolder
from andon.step.optimizer import OptimizerSpec
from andon.training.build import StepSpec, build_model, build_replicas
from andon.training.inference import load_run, rows_of
from andon.training.material import prepare
from andon.training.preview import describe
from andon.training.rows import read_rows
from tests.model.tiny import CPU, TINY, spec, task
from tests.training.kinds import KINDS, Kind
from tests.training.runs import row, summary

ROWS = task([[1, 2, 3], [4, 5]], [0, 1])
UPDATE = StepSpec(OptimizerSpec(), seed=5, micro_batches=2, clip_norm=1.0)


@pytest.mark.parametrize("own_base", [False, True])
def test_replicas_on_one_device_share_what_is_frozen_or_have_their_own(own_base: bool) -> None:
    model = build_model(spec("decoder"), AdapterSpec(r=2, alpha=4.0), 3)
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
    model = build_model(dataclasses.replace(spec(), base=str(tmp_path)), AdapterSpec(r=2, alpha=4.0), 3)
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
    save_base(build_base(replace(TINY, vocab_size=260, pad_id=0, max_length=128)), base, TINY.labels)
    byte_tokenizer().save(base)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModel": "own.Model"}}))
    runs, more = COLOUR.written(tmp_path), (f"model.base={base}", "training.max_steps=1")
    warning = "warning: the base's config.json names code of its own (own.Model), which Andon does not run"
    assert runs.train(tmp_path / "run", *more) == 0
    assert warning in capsys.readouterr().err
    assert any(line.startswith(warning) for line in describe(load_config(None, runs.overrides(*more), {})))
    load_run(RunFolder(tmp_path / "run"))
    assert warning in capsys.readouterr().err
    card = (tmp_path / "run" / "adapter" / "README.md").read_text()
    assert "The base's config.json names code of its own (own.Model), which Andon does not run" in card
