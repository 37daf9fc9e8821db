"""Instruction tuning from a file to a run folder: the same bits on any number of workers, packed or not."""

from __future__ import annotations

import json
from array import array
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from transformers import BertConfig, MistralConfig, MistralForCausalLM

import andon
from andon.cli.commands import app
from andon.cli.train import run_training
from andon.config.load import load_config
from andon.console.messages import Exit, InputError
from andon.data.chat import EncodedRow
from andon.data.rows import frozen_split
from andon.run.folder import RunFolder
from andon.tasks.sft import SftTask
from andon.training.inference import answer, evaluate_run, load_run, read_labelled
from andon.training.material import prepare
from andon.training.preview import describe
from andon_falsify.claims.ledgers import read_run, verify
from andon_falsify.verdict import Outcome
from tests.cli.command import cli
from tests.data.test_tokens import worded
from tests.training.runs import Runs, outcome, records, summary

pytestmark = pytest.mark.xdist_group("test_sft")

ROWS = 45
PACKED = ("training.packing=true", "model.max_length=160", "training.batch_size=4")


def conversation(number: int) -> dict[str, object]:
    """One or two questions with answers of 1 to 9 letters; of every sixth row the first answer is not learned."""
    turns: list[dict[str, object]] = []
    for turn in range(1 + number % 2):
        word = "abcdefghi"[: 1 + (number + turn) % 9]
        turns.append({"role": "user", "content": f"{'say ' * (number % 4)}{word}?"})
        turns.append({"role": "assistant", "content": word.upper()})
    if number % 6 == 1:
        turns[1]["train"] = False
    return {"messages": turns, "source": "odd" if number % 2 else "even"}


@pytest.fixture(scope="module")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    path = tmp_path_factory.mktemp("sft") / "talk.jsonl"
    path.write_text("".join(f"{json.dumps(conversation(number))}\n" for number in range(ROWS)))
    return Runs(path)


@pytest.fixture(scope="module", params=[(), PACKED], ids=["rows", "packs"])
def whole(
    request: pytest.FixtureRequest, conversations: Runs, tmp_path_factory: pytest.TempPathFactory
) -> tuple[tuple[str, ...], Path]:
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert conversations.train(folder, *request.param) == Exit.OK
    return request.param, folder


def test_an_encoder_is_refused_as_one_and_not_for_its_missing_template(conversations: Runs, tmp_path: Path) -> None:
    BertConfig(vocab_size=32, hidden_size=16, num_attention_heads=2).save_pretrained(worded(tmp_path, pad="<pad>"))
    with pytest.raises(InputError, match=r"^model\.base: .* is an encoder \(bert\), which cannot write the next token"):
        prepare(load_config(None, conversations.overrides(f"model.base={tmp_path}"), {}))


def test_a_resumed_run_ends_with_the_same_bits(
    conversations: Runs, whole: tuple[tuple[str, ...], Path], tmp_path: Path
) -> None:
    settings, alone = whole
    folder = conversations.stopped(tmp_path / "run", 5, *settings)
    assert conversations.train(folder, *settings, workers=3, resume="auto") == Exit.OK
    assert outcome(folder) == outcome(alone)
    assert [step.digests for step in records(folder, "step")] == [step.digests for step in records(alone, "step")]
    verdicts = {verdict.claim: verdict.outcome for verdict in verify([read_run(folder), read_run(alone)])}
    assert Outcome.FALSIFIED not in verdicts.values(), verdicts
    assert verdicts["samples-once"] is Outcome.HOLDS


def test_the_loss_is_a_mean_over_trained_tokens(
    conversations: Runs, whole: tuple[tuple[str, ...], Path], tmp_path: Path
) -> None:
    settings, alone = whole
    trained = [_letters(number) for number in range(ROWS)]
    config = load_config(None, conversations.overrides(*settings), {"run.dir": str(tmp_path / "run")})
    material = prepare(config)
    for step in records(alone, "step"):
        rows = [row for unit in step.ids for row in material.task.rows_of(unit)]  # type: ignore[attr-defined]
        assert step.terms == sum(trained[row] for row in rows)
        assert step.count == len(step.ids)
    seen = sorted(row for unit in range(len(material.task)) for row in material.task.rows_of(unit))  # type: ignore[attr-defined]
    assert seen == (sorted(material.rows.train_ids) if settings else list(range(ROWS)))


def _letters(number: int) -> int:
    """Trained tokens of a row, by the rule that it was made by: one a letter, and one that closes the answer."""
    answers = [1 + (number + turn) % 9 for turn in range(1 + number % 2)]
    return sum(length + 1 for length in (answers[1:] if number % 6 == 1 else answers))


def test_scores_are_by_source_and_sum_up(whole: tuple[tuple[str, ...], Path]) -> None:
    found = summary(whole[1])["eval"]
    parts = found["sources"].values()
    assert set(found["sources"]) <= {"even", "odd"}
    assert sum(part["tokens"] for part in parts) == found["tokens"]
    assert sum(part["rows"] for part in parts) == found["rows"]
    assert sum(part["loss"] * part["tokens"] for part in parts) / found["tokens"] == pytest.approx(found["loss"])
    assert found["perplexity"] == pytest.approx(torch.tensor(found["loss"]).exp().item())
    assert 0 <= found["exact_match"] <= 1


def test_a_reader_is_told_what_was_taken(conversations: Runs, tmp_path: Path) -> None:
    overrides = conversations.overrides(*PACKED, "run.backend=inline")
    said = "\n".join(describe(load_config(None, overrides, {})))
    assert "task sft" in said
    assert "trained tokens: messages, each after its role" in said
    assert "packs of 160 tokens" in said


def test_a_trained_run_is_scored_and_asked_again(whole: tuple[tuple[str, ...], Path], tmp_path: Path) -> None:
    _, folder = whole
    run = load_run(RunFolder(folder))
    _, held = frozen_split(ROWS, run.config.data.validation_fraction, run.config.seed)
    file = tmp_path / "held.jsonl"
    file.write_text("".join(f"{json.dumps(conversation(number))}\n" for number in held))
    assert evaluate_run(run, read_labelled(RunFolder(folder), file)).as_dict() == summary(folder)["eval"]
    once, twice = ([*answer(run, ["abc?", "say hi?"], 12)] for _ in range(2))
    assert once == twice
    assert all(each.tokens == 12 or each.finished for each in once)
    asked = RunFolder(folder).adapter / "conversations.json"
    assert json.loads(asked.read_text()) == {"form": "messages", "stops": [2]}


def test_the_file_that_was_trained_on_can_be_asked(conversations: Runs, whole: tuple[tuple[str, ...], Path]) -> None:
    given = ["generate", str(whole[1]), "--max-new-tokens", "3"]
    told = CliRunner().invoke(app, [*given, "--data", str(conversations.data)], catch_exceptions=False).stdout
    answers = [json.loads(line) for line in told.splitlines()]
    assert len(answers) == ROWS
    assert [each["prompt"] for each in answers[:2]] == [
        "a?",
        [
            {"role": role, "content": text}
            for role, text in (("user", "say ab?"), ("assistant", "AB"), ("user", "say abc?"))
        ],
    ]
    (alone,) = andon.open_run(whole[1]).generate(["a?"], max_new_tokens=3)
    assert asdict(alone) == answers[0]


def test_a_run_of_one_task_is_not_used_for_another(conversations: Runs, whole: tuple[tuple[str, ...], Path]) -> None:
    given = ["predict", str(whole[1]), str(conversations.data)]
    with pytest.raises(InputError, match="is a run of sft; use andon generate"):
        CliRunner().invoke(app, given, catch_exceptions=False)
    with pytest.raises(InputError, match="is a run of sft; use andon generate"):
        andon.open_run(whole[1]).predict(["abc?"])


def test_what_cannot_be_told_of_packs_is_not_told(whole: tuple[tuple[str, ...], Path]) -> None:
    settings, folder = whole
    said = CliRunner().invoke(app, ["show", str(folder), "--step", "2"], catch_exceptions=False).output
    assert ("say" in said) is not bool(settings)
    assert ("an id is a pack" in said) is bool(settings)


def test_memory_is_planned(conversations: Runs) -> None:
    given = ["plan", "--data", conversations.data, "--gpu-memory", "16", "--json", "--set=model.max_length=320"]
    rows, packs = (
        json.loads("\n".join(cli(*given, *(f"--set={each}" for each in settings)).out))["worlds"][0]
        for settings in ((), ("training.packing=true", "training.batch_size=64", "training.micro_batches=1"))
    )
    rows, packs = (each["devices"][0]["each_rank"] for each in (rows, packs))
    assert 0 < rows["activations"] < packs["activations"]
    assert 0 < rows["evaluation"] <= packs["evaluation"]


def test_a_model_needs_to_see_as_far_as_a_row_and_not_as_a_pack() -> None:
    """Rows of 4 tokens in packs of 12: a window of 4 tokens is enough, one of 3 is not."""
    rows = [EncodedRow(place, array("i", [1, 2, 3, 4]), array("f", [0, 1, 1, 1])) for place in range(6)]
    task = SftTask(rows, pad_id=0, max_length=12).packed(range(6))
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 33}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    models = {
        window: MistralForCausalLM(MistralConfig(**sizes, **heads, sliding_window=window, use_cache=False))
        for window in (3, 4)
    }
    task.require_fit(models[4], torch.device("cpu"))
    with pytest.raises(InputError, match="limits how far a token sees"):
        task.require_fit(models[3], torch.device("cpu"))


def test_what_was_cut_off_an_answer_counts_as_missed() -> None:
    tokens, weights = array("i", [1, 2, 3]), array("f", [0, 1, 1])
    rows = [EncodedRow(0, tokens, weights), EncodedRow(1, tokens, weights, cut=3, cut_trained=2)]
    task = SftTask(rows, pad_id=0, max_length=3, sources=("a", "b"))
    found = task.score([0, 1], torch.tensor([[0.5, 2.0, 2.0], [1.5, 2.0, 2.0]], dtype=torch.float64))
    assert (found.exact_match, found.token_accuracy, found.tokens, found.cut) == (0.5, 4 / 6, 6, 2)
    assert found.loss == 2.0 / 4
    assert (found.sources["a"].token_accuracy, found.sources["b"].token_accuracy) == (1.0, 0.5)
    assert (task.cut_rows([0]), task.cut_rows([0, 1])) == (0, 1)


def test_packs_are_for_conversations(runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match=r"training.packing: is for conversations"):
        runs.train(tmp_path / "run", "training.packing=true")
    assert not (tmp_path / "run").exists() or not [*(tmp_path / "run").iterdir()]


def test_the_embedded_instructions_have_defaults_of_their_own() -> None:
    embedded = load_config(None, ["task=sft"], {})
    assert (embedded.adapter.kind, embedded.model.dropout) == ("none", 0.0)
    assert load_config(None, ["task=sft", "adapter.kind=lora"], {}).adapter.kind == "lora"
    assert load_config(None, ["task=sft", "data.train=talk.jsonl"], {}).adapter.kind == "lora"
    assert load_config(None, ["task=sft", "model.base=here"], {}).adapter.kind == "lora"
    assert load_config(None, [], {}).adapter.kind == "lora"


def test_the_embedded_instructions_begin_to_be_learned(tmp_path: Path) -> None:
    flags = {"run.dir": str(tmp_path / "run"), "run.backend": "inline", "run.workers": 1}
    assert run_training(None, ["task=sft", "training.max_steps=10"], flags) == Exit.OK
    first, *_, last = (step.loss.value for step in records(tmp_path / "run", "step"))
    assert last < 0.8 * first


# Deep: the whole of it. `test_the_embedded_instructions_begin_to_be_learned` has the first updates.
@pytest.mark.deep
def test_the_embedded_instructions_are_learned(tmp_path: Path) -> None:
    """As `andon train --task sft`: nine of ten answers to prompts that it was never trained on, to the letter."""
    flags = {"run.dir": str(tmp_path / "run"), "run.backend": "inline", "run.workers": 2}
    assert run_training(None, ["task=sft"], flags) == Exit.OK
    assert summary(tmp_path / "run")["eval"]["exact_match"] >= 0.9
