"""Preference tuning from a file to a run folder: one digest on any number of workers."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from transformers import OPTConfig, OPTForCausalLM, Qwen3Config, Qwen3ForCausalLM

import andon.training.reference
from andon.cli.commands import app
from andon.config.load import load_config
from andon.console.messages import Exit, InputError
from andon.data.tokens import byte_tokenizer
from andon.model.causal import row_log_probs
from andon.run.folder import RunFolder
from andon.training.inference import evaluate_run, load_run, read_labelled
from andon.training.material import prepare
from andon.training.preview import describe
from andon.training.run import assembled
from tests.training.runs import Runs, outcome, records, summary

pytestmark = pytest.mark.xdist_group("test_dpo")

PACKED = ("training.packing=true", "model.max_length=40", "training.batch_size=6")


def preference(number: int) -> dict[str, str]:
    """Answers of 2 to 10 letters, the chosen one in capitals, of different lengths."""
    word, other = ("abcdefghi"[: 1 + (number + more) % 9] for more in (0, 4))
    return {"prompt": f"{'say ' * (number % 3)}{word}?", "chosen": f" {word.upper()}", "rejected": f" {other}"}


@pytest.fixture(scope="module")
def preferences(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    path = tmp_path_factory.mktemp("dpo") / "pairs.jsonl"
    rows = (preference(number) | {"source": "odd" if number % 2 else "even"} for number in range(31))
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return Runs(path)


@pytest.fixture(scope="module", params=[(), PACKED], ids=["pairs", "packs"])
def whole(
    request: pytest.FixtureRequest, preferences: Runs, tmp_path_factory: pytest.TempPathFactory
) -> tuple[tuple[str, ...], Path]:
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert preferences.train(folder, *request.param) == Exit.OK
    return request.param, folder


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_the_digest_is_that_of_one_worker(
    preferences: Runs, whole: tuple[tuple[str, ...], Path], workers: int, tmp_path: Path
) -> None:
    settings, alone = whole
    backend = "gloo" if workers == 3 else "inline"
    assert preferences.train(tmp_path / "run", *settings, backend=backend, workers=workers) == Exit.OK
    assert outcome(tmp_path / "run") == outcome(alone)


@pytest.mark.parametrize("stored", [True, False])
def test_a_resume_has_the_reference_of_the_start(
    preferences: Runs,
    whole: tuple[tuple[str, ...], Path],
    stored: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It loads the columns; if they are lost, it computes the same ones from the initial weights."""
    settings, alone = whole
    folder = preferences.stopped(tmp_path / "run", 5, *settings)
    if not stored:
        shutil.rmtree(RunFolder(folder).tokens)
    capsys.readouterr()
    assert preferences.train(folder, *settings, workers=3, resume="auto") == Exit.OK
    assert ("under the model before training" in capsys.readouterr().err) is not stored
    assert outcome(folder) == outcome(alone)
    assert [step.digests for step in records(folder, "step")] == [step.digests for step in records(alone, "step")]


def test_a_resume_with_another_reference_is_refused(
    preferences: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = preferences.stopped(tmp_path / "run", 5)
    shutil.rmtree(RunFolder(folder).tokens)
    monkeypatch.setattr(andon.training.reference, "row_log_probs", lambda *args: row_log_probs(*args) * (1 + 1e-9))
    with pytest.raises(InputError, match=r"^reference: was .*; \S+tokens had the values and is lost or damaged"):
        preferences.train(folder, resume="auto")
    with pytest.raises(InputError) as raised:
        preferences.train(folder, "optimizer.lr=0.5", resume="auto")
    assert [problem.where for problem in raised.value.problems] == ["optimizer.lr"]


@pytest.mark.parametrize(
    "settings",
    [(), PACKED, ("model.dtype=bfloat16",), ("adapter.kind=none",), ("model.base=BASE",), ("model.new_tokens=[say]",)],
)
def test_the_margin_before_update_1_is_zero(preferences: Runs, settings: tuple[str, ...], tmp_path: Path) -> None:
    """Of each pair of the update: none has a positive one, and their mean loss is that of 0. Also on a base that keeps
    rates of dropout, not 0, as plain numbers."""
    sizes = {"hidden_size": 16, "word_embed_proj_dim": 16, "ffn_dim": 16, "num_attention_heads": 2, "vocab_size": 260}
    OPTForCausalLM(OPTConfig(**sizes, num_hidden_layers=1, dropout=0.4)).save_pretrained(tmp_path / "BASE")
    byte_tokenizer(pairs=False, begins=True).base.save_pretrained(tmp_path / "BASE")
    settings = tuple(each.replace("BASE", str(tmp_path / "BASE")) for each in settings)
    assert preferences.train(tmp_path / "run", *settings, "training.max_steps=1") == Exit.OK
    step = records(tmp_path / "run", "step")[0]
    assert abs(step.loss.value - math.log(2)) <= 0.1 * 1e-5 / 2
    assert step.correct == 0


def test_the_reference_has_no_dropout(preferences: Runs, tmp_path: Path) -> None:
    """Passes of training compute it, but for dropout."""
    config = load_config(None, preferences.overrides("model.dropout=0.5", "run.backend=inline"), {})
    with assembled(config, RunFolder(tmp_path / "run"), writing=False) as session:
        task: Any = session.material.task
        expected = task.outputs(session.run.primary.model, task.load(session.material.plan.ids, torch.device("cpu")))
        assert torch.allclose(task.references[[*session.material.plan.ids]], expected, rtol=1e-6, atol=1e-6)


def test_a_run_is_not_scored_from_another_start(preferences: Runs, tmp_path: Path) -> None:
    """The reference of `andon eval` is the adapter that the run went on from, as it was."""
    assert isinstance(preferences.data, Path)
    first, second = (RunFolder(tmp_path / name) for name in ("first", "second"))
    few = ("training.max_steps=2", f"data.eval={preferences.data}")
    assert preferences.train(first.path, *few) == preferences.train(second.path, *few, f"adapter.init={first.adapter}")
    run, rows = load_run(second), read_labelled(second, preferences.data)
    assert evaluate_run(run, rows).as_dict()["margin"] == pytest.approx(summary(second.path)["eval"]["margin"])
    shutil.copy(second.adapter / "adapter_model.safetensors", first.adapter)
    with pytest.raises(InputError, match=r"^adapter\.init: its weights have digest \w+, the run began with \w+; put"):
        evaluate_run(run, rows)


def test_scores_are_those_of_stock_libraries(
    whole: tuple[tuple[str, ...], Path], preferences: Runs, tmp_path: Path
) -> None:
    """Rewards from the exported adapter and its base, each row alone, by peft and transformers."""
    from peft import PeftModel

    assert isinstance(preferences.data, Path)
    _, folder = whole
    run = load_run(RunFolder(folder))
    ours: Any = evaluate_run(run, read_labelled(RunFolder(folder), preferences.data))
    base = Qwen3ForCausalLM.from_pretrained(folder / "base")
    rows = [preference(number) for number in range(31)]

    def log_probs(model: Any) -> torch.Tensor:
        return torch.tensor(
            [[_log_prob(model, row["prompt"], row[side]) for side in ("chosen", "rejected")] for row in rows]
        )

    before = log_probs(base)
    rewards = 0.1 * (log_probs(PeftModel.from_pretrained(base, folder / "adapter")) - before)
    margins = rewards[:, 0] - rewards[:, 1]
    assert ours.rows == 31
    assert ours.margin == pytest.approx(float(margins.mean()), abs=1e-5)
    assert ours.chosen_reward == pytest.approx(float(rewards[:, 0].mean()), abs=1e-5)
    assert ours.reward_accuracy == pytest.approx(float((margins > 0).float().mean()), abs=1e-6)
    assert ours.loss == pytest.approx(float(-torch.nn.functional.logsigmoid(margins).mean()), abs=1e-5)
    assert sum(part.rows * part.margin for part in ours.sources.values()) == pytest.approx(31 * ours.margin)
    assert {"loss", "reward_accuracy", "margin"} <= summary(folder)["eval"].keys()


def _log_prob(model: Any, prompt: str, answer: str) -> float:
    tokenizer = byte_tokenizer(pairs=False, begins=True).base
    asked, ids = (tokenizer(text)["input_ids"] for text in (prompt, prompt + answer))
    tokens = torch.tensor([[*ids, tokenizer.eos_token_id]])
    with torch.no_grad():
        chances = model(tokens).logits[0].log_softmax(1)
    return float(sum(chances[place - 1, tokens[0, place]] for place in range(len(asked), tokens.shape[1])))


def test_a_pair_with_an_unusable_answer_is_left_out(preferences: Runs, tmp_path: Path) -> None:
    rows = [preference(number) for number in range(12)]
    rows[5]["rejected"] += " </s>"
    rows[7]["prompt"] += " </s>"
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    base = small_base(tmp_path / "base")
    settings = [f"model.base={base}", f"data.train={path}", "data.validation_fraction=0.2"]
    with pytest.raises(InputError, match=r"pairs\.jsonl:6: rejected: completion spells the special token '</s>'"):
        prepare(load_config(None, settings, {}))
    material = prepare(load_config(None, [*settings, "data.bad_rows=skip"], {}))
    assert {*material.task.skipped} | {*material.validation_task.skipped} == {5, 7}  # type: ignore[union-attr]
    trained = {pair for item in material.plan.ids for pair in material.task.rows_of(item)}  # type: ignore[union-attr]
    assert trained | {*material.validation_ids} == {*range(12)} - {5, 7}


def test_the_doors_of_a_run(whole: tuple[tuple[str, ...], Path], preferences: Runs) -> None:
    folder = whole[1]
    said = "\n".join(describe(load_config(None, preferences.overrides("run.backend=inline"), {}), 3))
    assert "task: dpo, as rows have 'chosen' and 'rejected'" in said
    assert "chosen:\nrow 3:" in said
    answers = CliRunner().invoke(app, ["generate", str(folder), "abc?", "--max-new-tokens", "3"])
    assert json.loads(answers.stdout)["prompt"] == "abc?"
    with pytest.raises(InputError, match="is a run of dpo; use andon generate"):
        CliRunner().invoke(app, ["predict", str(folder), "abc?"], catch_exceptions=False, standalone_mode=False)
    with pytest.raises(InputError, match=r"^data\.train_on: all is for task sft"):
        prepare(load_config(None, preferences.overrides("data.train_on=all"), {}))


def small_base(folder: Path) -> Path:
    """A Qwen3 of two layers with random weights, and a tokenizer that reads special tokens in texts."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16, "vocab_size": 260}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, initializer_range=0.2)).save_pretrained(folder)
    tokenizer = byte_tokenizer(pairs=False, begins=True).base
    tokenizer.split_special_tokens = False
    tokenizer.save_pretrained(folder)
    return folder
