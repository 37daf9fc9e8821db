"""Runs that go on from an adapter, and the kinds of adapters of peft: one result on one and two workers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.cli.command import cli
from tests.training.runs import Runs, outcome
from tests.training.test_export import MERGE, chat_base, conversations, exported

KINDS = {
    "rslora": ("adapter.rslora=true", "adapter.exclude=[o_proj]"),
    "dora": ("adapter.dora=true",),
    "saved": ("adapter.modules_to_save=[norm, mlp, lm_head]",),
}


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("going_on")
    chat_base(folder / "base")
    settings = (f"model.base={folder / 'base'}", "task=sft", "optimizer.lr=0.04")
    return Runs(conversations(folder, "chat").data, settings)


@pytest.fixture(scope="module")
def first(chats: Runs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("first") / "run"
    assert chats.train(folder, "training.epochs=1") == 0
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_stock_peft_and_a_merge_give_the_runs_logits(kind: str, chats: Runs, tmp_path: Path) -> None:
    """`andon export` compares with stock libraries, and ends with an error beyond rounding."""
    assert chats.train(tmp_path / "run", *KINDS[kind], "training.max_steps=4") == 0
    for options in ((), MERGE):
        (said,) = [line for line in exported(tmp_path / "run", tmp_path / "out", *options) if "largest" in line]
        assert "and 0 greedy answers change" in said
        shutil.rmtree(tmp_path / "out")


def test_every_kind_has_one_result_on_one_and_two_workers(chats: Runs, tmp_path: Path) -> None:
    settings = (*KINDS["rslora"], *KINDS["dora"], "adapter.modules_to_save=[norm, embed_tokens]")
    settings = (*settings, "adapter.dropout=0.2", "training.max_steps=5")
    assert chats.train(tmp_path / "one", *settings) == 0
    assert chats.train(tmp_path / "two", *settings, backend="gloo", workers=2) == 0
    assert outcome(tmp_path / "one") == outcome(tmp_path / "two")


def test_a_run_goes_on_from_the_weights_of_another(chats: Runs, first: Path, tmp_path: Path) -> None:
    """On two workers as on one, and its result needs the first run no more."""
    source = shutil.copytree(first / "adapter", tmp_path / "source")
    stopped = chats.stopped(tmp_path / "run", 5, f"adapter.init={source}", "seed=7")
    assert chats.train(tmp_path / "one", f"adapter.init={source}", "seed=7") == 0
    assert chats.train(stopped, f"adapter.init={source}", "seed=7", backend="gloo", workers=2, resume="auto") == 0
    assert outcome(stopped) == outcome(tmp_path / "one")
    assert outcome(stopped)["initial_weights_digest"] == outcome(first)["weights_digest"]
    shutil.rmtree(source)
    assert cli("generate", stopped, "red?").code == 0


@pytest.mark.parametrize(
    ("changed", "settings", "said"),
    [
        ({}, ["adapter.r=3"], "adapter.r: is 3, and the adapter in SOURCE has 2; --set adapter.r=2"),
        ({}, ["adapter.rslora=true"], "adapter.rslora: is true, and the adapter in SOURCE has false"),
        ({}, ["adapter.targets=[q_proj]"], "adapter.targets: adapts q_proj; the adapter in SOURCE adapts down_proj"),
        (
            {},
            ["adapter.modules_to_save=[norm]"],
            "adapter_model.safetensors: has no base_model.model.model.norm.weight",
        ),
        ({"peft_type": "IA3"}, [], "adapter.init: 'SOURCE' is not a LoRA adapter of peft"),
        ({"alpha_pattern": {"q_proj": 4}}, [], "adapter.init: 'SOURCE' has alpha_pattern, which is not supported"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(
    changed: dict[str, object], settings: list[str], said: str, chats: Runs, first: Path, tmp_path: Path
) -> None:
    source = shutil.copytree(first / "adapter", tmp_path / "source")
    file = source / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    overrides = chats.overrides(f"adapter.init={source}", *settings)
    ended = cli("check", *(word for each in overrides for word in ("--set", each)))
    assert ended.code == 2
    assert any(said.replace("SOURCE", str(source)) in line for line in ended.said), ended.said


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("adapter.init=nowhere", "adapter.init: cannot read the adapter in 'nowhere'"),
        ("adapter.exclude=[o_prj]", "adapter.exclude: 'o_prj' matches no Linear module; did you mean 'o_proj'?"),
        ("adapter.modules_to_save=[nrm]", "adapter.modules_to_save: 'nrm' matches no module; did you mean 'norm'?"),
    ],
)
def test_a_module_or_folder_that_is_not_there_is_named(setting: str, said: str, chats: Runs) -> None:
    ended = cli("check", *(word for each in chats.overrides(setting) for word in ("--set", each)))
    assert ended.code == 2
    assert any(said in line for line in ended.said), ended.said
