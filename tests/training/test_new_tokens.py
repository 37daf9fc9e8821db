"""`model.new_tokens` from a file to an answer: the same bits anywhere, and they go along wherever the model goes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from transformers import AutoTokenizer

from andon.cli.commands import app
from andon.config.load import load_config
from andon.console.messages import Exit, InputError
from andon.run.folder import RunFolder
from andon.training.material import prepare
from tests.support.stock import Stock
from tests.training.runs import Runs, outcome, summary
from tests.training.test_export import PROMPTS, answers_of_run, answers_of_stock, conversations, exported

pytestmark = pytest.mark.xdist_group("test_new_tokens")

NEW = {"<tool>": 260, "</tool>": 261}  # by id: the embedded tokenizer has 260 tokens before them
TOKENS = f"model.new_tokens={json.dumps([*NEW])}"
WIDE = ("model.hidden_size=32", "model.intermediate_size=32", "optimizer.lr=0.02", "training.epochs=12")
"""What a model needs to learn the rows."""


@pytest.fixture(scope="module")
def called(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return conversations(tmp_path_factory.mktemp("talk"), "chat", "<tool>{}</tool>")


@pytest.fixture(scope="module")
def whole(called: Runs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert called.train(folder, TOKENS) == Exit.OK
    return folder


@pytest.fixture(scope="module")
def learned(called: Runs, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A base that answers with the letter alone, and a run on it that learned to put it between new tokens."""
    folder = tmp_path_factory.mktemp("learned")
    assert conversations(folder, "chat").train(folder / "plain", *WIDE, "adapter.kind=none") == Exit.OK
    exported(folder / "plain", folder / "base", "--merge")
    assert called.train(folder / "run", *WIDE, TOKENS, "adapter.r=8", f"model.base={folder / 'base'}") == Exit.OK
    return folder / "base", folder / "run"


def test_a_resumed_run_ends_with_the_same_bits(called: Runs, whole: Path, tmp_path: Path) -> None:
    folder = called.stopped(tmp_path / "run", 5, TOKENS)
    with pytest.raises(InputError, match=r"model.new_tokens"):
        called.train(folder, "model.new_tokens=[<tool>]", resume="auto")
    assert called.train(folder, TOKENS, backend="gloo", workers=2, resume="auto") == Exit.OK
    assert outcome(folder) == outcome(whole)


def test_they_are_in_the_record_and_in_the_folder_of_the_adapter(whole: Path) -> None:
    folder = RunFolder(whole)
    assert json.loads(folder.provenance.read_text())["new_tokens"] == NEW
    tokenizer = AutoTokenizer.from_pretrained(folder.adapter)
    assert tokenizer.convert_tokens_to_ids([*NEW]) == [*NEW.values()]
    assert tokenizer.decode(tokenizer("a<tool>b")["input_ids"], skip_special_tokens=True) == "a<tool>b"
    settings = json.loads((folder.adapter / "adapter_config.json").read_text())
    assert settings["trainable_token_indices"] == {"model.embed_tokens": [*NEW.values()]}
    (rows,) = (t for name, t in load_file(folder.adapter / "adapter_model.safetensors").items() if "token" in name)
    assert (tuple(rows.shape), rows.dtype) == ((2, 16), torch.float32)
    assert "whose rows were trained: `<tool>`, `</tool>`" in (folder.adapter / "README.md").read_text()


def test_a_model_learns_to_write_them(learned: tuple[Path, Path]) -> None:
    answers = answers_of_run(learned[1])
    assert answers[:2] == ["<tool>r</tool>", "<tool>g</tool>"]
    assert summary(learned[1])["eval"]["exact_match"] == 1.0


# Deep for `unmerged`: tests/training/test_export.py shows by default what an adapter gives.
@pytest.mark.parametrize(
    "options", [("--merge",), pytest.param((), marks=pytest.mark.deep)], ids=["merged", "unmerged"]
)
def test_stock_transformers_answers_as_the_run_does(
    learned: tuple[Path, Path], tmp_path: Path, stock: Stock, options: tuple[str, ...]
) -> None:
    exported(learned[1], tmp_path / "out", *options)
    assert answers_of_stock(stock, tmp_path / "out") == answers_of_run(learned[1])


def test_no_other_row_of_the_vocabulary_changes(learned: tuple[Path, Path], tmp_path: Path) -> None:
    base, run = learned
    exported(run, tmp_path / "out", "--merge")
    was = load_file(base / "model.safetensors")["model.embed_tokens.weight"]
    now = load_file(tmp_path / "out" / "model.safetensors")["model.embed_tokens.weight"]
    assert now.shape == (262, 32)
    assert torch.equal(now[:260], was)
    assert ((now[260:] - was.double().mean(0)).norm(dim=1) > 0.1).all()


def test_tokens_that_were_made_without_them_are_not_taken(called: Runs, tmp_path: Path) -> None:
    kept = f"data.cache={tmp_path}"
    plain, new = (
        prepare(load_config(None, called.overrides("task=sft", kept, *more), {})).task for more in ((), (TOKENS,))
    )
    assert int(plain.lengths[0]) - int(new.lengths[0]) == len("<tool></tool>") - 2
    assert set(NEW.values()) <= set(new.load([0], torch.device("cpu"))["input_ids"].flatten().tolist())


def test_every_weight_may_train_with_them(called: Runs, tmp_path: Path) -> None:
    assert called.train(tmp_path / "run", TOKENS, "adapter.kind=none", "training.epochs=1") == Exit.OK
    weights = load_file(RunFolder(tmp_path / "run").adapter / "model.safetensors")
    assert weights["model.embed_tokens.weight"].shape == (262, 16)
    assert len(answers_of_run(tmp_path / "run", most=2)) == len(PROMPTS)


def test_a_reader_is_told(called: Runs) -> None:
    given = ["check", *(part for each in called.overrides(TOKENS) for part in ("--set", each))]
    said = CliRunner().invoke(app, given, catch_exceptions=False).output
    assert "new tokens, by id: '<tool>' 260, '</tool>' 261; each starts as the mean of all rows before them" in said


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ('["<a>", "<pad>"]', "'<pad>' is a token of this tokenizer already (id 0); leave it out"),
        ('["k"]', "'k' is a token of this tokenizer already (id 78); leave it out"),
        ('["<pad>2"]', "'<pad>2' holds the special token '<pad>', which no message may spell"),
        ('["é"]', "'é' stands for something else in this tokenizer's vocabulary ("),
        ('["größe"]', "'größe' is not read and written as one token by this tokenizer"),
    ],
)
def test_what_a_tokenizer_cannot_take_is_refused(called: Runs, more: str, what: str) -> None:
    config = load_config(None, called.overrides("task=sft", f"model.new_tokens={more}"), {})
    with pytest.raises(InputError, match=re.escape(f"model.new_tokens: {what}")):
        prepare(config)


def test_a_classifier_has_none(runs: Runs, tmp_path: Path) -> None:
    said = r"model.new_tokens: are for tasks sft and dpo, and the task is classification \('<a>'\)"
    with pytest.raises(InputError, match=said):
        runs.train(tmp_path / "run", "model.new_tokens=[<a>]")
    assert not (tmp_path / "run").exists()
