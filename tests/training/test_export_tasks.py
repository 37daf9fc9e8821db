"""What `andon export` writes of every task gives the run's own numbers and answers, by transformers and peft alone."""

from __future__ import annotations

import ast
import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, Qwen3Config, Qwen3ForCausalLM
from typer.testing import CliRunner

from andon.cli.commands import app
from andon.console.exits import Exit
from andon.data.tokens import byte_tokenizer
from andon.model import adapter
from andon.model.build import seeded
from andon.run.folder import RunFolder
from andon.training import export
from andon.training.inference import TrainedRun, load_run
from tests.cli.command import andon, tree
from tests.data.test_chat import CHATML, tokenizer
from tests.training.kinds import IDS, KINDS, Kind, started, written
from tests.training.runs import Runs, outcome, summary
from tests.training.test_export import alone, exported

ASKED = 8
"""Rows of the training file that are asked again: texts of different lengths, and one that is cut."""
PROMPTS = ("red?", "say it: green?", "größe ☃?")
SFT_FORMS = ("messages", "prompts", "text", "chat", "whole")


def code_of(folder: Path) -> str:
    """What the card in a folder shows, for that folder."""
    found = re.search(r"## Use\n\n((?:    .*\n|\n)+)", (folder / "README.md").read_text())
    assert found is not None
    return re.sub("^    ", "", found[1], flags=re.MULTILINE).replace("THIS FOLDER", str(folder))


# Texts that get a number, several labels, a tag for each word; pairs of texts


def base_of(kind: Kind, folder: Path) -> Path:
    """An encoder with a head of its own for another problem and of another size."""
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    others = {"num_labels": 5, "problem_type": "regression"}
    with seeded(3):
        BertForSequenceClassification(BertConfig(**small, **others, vocab_size=260)).save_pretrained(folder)
    byte_tokenizer(pairs=kind.name == "pairs").save(folder)
    return folder


@pytest.fixture(scope="module", params=KINDS, ids=IDS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Kind, Path]:
    """A task, and runs of it on the embedded decoder and on an encoder, both learned far enough to matter."""
    kind = request.param
    folder = tmp_path_factory.mktemp(kind.name or kind.task)
    data = written(folder, kind)
    base = base_of(kind, folder / "base")
    for name, more in (("embedded", ()), ("pretrained", (f"model.base={base}",))):
        learned = Kind(kind.task, kind.rows, "", settings=(*kind.settings, "optimizer.lr=0.05", *more))
        assert started(learned, data, folder / name, "inline", 1) == 0
    return kind, folder


def asked_rows(folder: Path) -> list[dict[str, Any]]:
    """Rows as they are asked; the last is longer than the 128 tokens at which a run cuts."""
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()[:ASKED]]
    if "tokens" in rows[-1]:
        rows[-1]["tokens"] *= 30
    else:
        rows[-1]["text"] *= 8
    return [{key: row[key] for key in ("text", "about", "tokens") if key in row} for row in rows]


def told_by_run(run: Path, rows: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """What `andon predict --all-scores` writes."""
    (folder / "asked.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    given = ["predict", str(run), str(folder / "asked.jsonl"), "--all-scores", "--output", str(folder / "told.jsonl")]
    ended = CliRunner().invoke(app, given, catch_exceptions=False)
    assert ended.exit_code == 0, ended.output
    told = [json.loads(line) for line in (folder / "told.jsonl").read_text().splitlines()]
    (folder / "told.jsonl").unlink()
    return told


def told_by_stock(folder: Path, rows: list[dict[str, Any]], elsewhere: Path) -> Any:
    """By the code of the card: of each row its scores by label, or the tag of each of its words."""
    code = code_of(folder)
    if "tokens" in rows[0]:
        texts = [" ".join(row["tokens"]) for row in rows]
        code = code.replace("print(word[0], ", "found.append(").replace("found.append", "found[-1].append")
        code = code.replace('in ["a text"]:', f"in {texts!r}:\n    found.append([])")
        return ast.literal_eval(alone(f"found = []\n{code}\nprint(found)", elsewhere))
    given = [{"text": row["text"], "text_pair": row["about"]} if "about" in row else row["text"] for row in rows]
    code = re.sub(r"use\(\[.*\], top_k", lambda _: f"use({given!r}, top_k", code)
    return [{one["label"]: one["score"] for one in each} for each in ast.literal_eval(alone(code, elsewhere))]


@pytest.mark.parametrize(("run", "options"), [("embedded", ()), ("pretrained", ()), ("pretrained", ("--merge",))])
def test_stock_transformers_says_what_the_run_says(
    made: tuple[Kind, Path], tmp_path: Path, run: str, options: tuple[str, ...]
) -> None:
    """Numbers as they are, a probability for each label, a tag for each word, in one folder with the code of its card;
    a base that was trained on another problem does not decide how they are read."""
    kind, folder = made
    rows = asked_rows(folder)
    said = exported(folder / run, tmp_path / "out", *options)
    ours, stock = told_by_run(folder / run, rows, tmp_path), told_by_stock(tmp_path / "out", rows, tmp_path)
    if kind.task == "token-classification":
        assert stock == [row["tags"] for row in ours]
        assert None in ours[-1]["tags"]
    elif kind.task == "regression":
        assert [row["value"] for row in stock] == pytest.approx([row["value"] for row in ours], abs=1e-5)
    else:
        assert stock == [pytest.approx(row["scores"], abs=1e-6) for row in ours]
    if options:
        whats = {"regression": "from a number of the run", "token-classification": "0 words get another tag"}
        assert whats.get(kind.task, "0 rows get ") in said[1]


def test_the_card_has_the_scores_and_a_command_that_repeats_the_run(made: tuple[Kind, Path], tmp_path: Path) -> None:
    """As the hub reads it, with counts; typed in a folder with the rows the command gives the same weights."""
    kind, folder = made
    exported(folder / "embedded", tmp_path / "out")
    text, found = (tmp_path / "out" / "README.md").read_text(), summary(folder / "embedded")["eval"]
    data = ModelCard(text).data
    tag = "token-classification" if kind.task == "token-classification" else "text-classification"
    assert data.to_dict()["pipeline_tag"] == tag
    names = {
        "regression": {"RMSE": "rmse", "MAE": "mae", "Pearson": "pearson", "Spearman": "spearman"},
        "multi-label": {"all labels right": "subset_accuracy", "micro-F1": "micro_f1", "macro-F1": "macro_f1"},
        "token-classification": {
            "F1": "f1",
            "precision": "precision",
            "recall": "recall",
            "word accuracy": "accuracy",
        },
        "classification": {"accuracy": "accuracy", "macro-F1": "macro_f1", "MCC": "mcc", "AUROC": "auroc"},
    }[kind.task]
    told = {each.metric_name: each.metric_value for each in data.eval_results or ()}
    assert told == {name: found[key] for name, key in names.items() if found[key] is not None}
    share = {"multi-label": "subset_accuracy", "regression": "rmse"}.get(kind.task, "accuracy")
    count = found.get("words", found["rows"])
    unit = "words" if "words" in found else "rows"
    of = f"{count} {unit}" if kind.task == "regression" else f"{found[share] * count:.0f} of {count} {unit}"
    assert f"| {found[share]:.4f} | {of} |" in text
    command = next(line.strip() for line in text.splitlines() if line.startswith("    andon train "))
    shutil.copy(folder / "rows.jsonl", tmp_path)
    ended = andon(*shlex.split(command)[1:], "--run-dir", "again", folder=tmp_path)
    assert ended.code == 0, ended.said
    assert outcome(tmp_path / "again") == outcome(folder / "embedded")


def test_a_base_in_another_unit_is_held_to_its_own_size(tmp_path: Path) -> None:
    """Numbers around a million differ by more than a thousandth in fp32, which is rounding and nothing else."""
    kind = KINDS[0]
    large = Kind(kind.task, lambda place: kind.rows(place) | {"label": 1e6 + place}, "")
    assert started(large, written(tmp_path, large), tmp_path / "run", "inline", 1) == 0
    run = load_run(RunFolder(tmp_path / "run"))
    with_head_of(run, 1e6)
    (said,) = export.export_merged(run, tmp_path / "out")
    assert "from a number of the run" in said


def with_head_of(run: TrainedRun, factor: float) -> None:
    """The run's model says numbers so many times as large."""
    for name, parameter in run.model.named_parameters():
        if "modules_to_save" in name:
            parameter.data *= factor


# Conversations


def turns(prompt: str, answer: str) -> list[dict[str, str]]:
    """A prompt and its answer as messages."""
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


def conversations(folder: Path, form: str) -> Path:
    """Rows of which the answer is the first letter of the word that is asked for."""
    path = folder / "talk.jsonl"
    words = [("red", "green", "blue")[number % 3] for number in range(45)]
    asked = [f"{'say it: ' * (number % 2)}{word}?" for number, word in enumerate(words)]
    made: dict[str, Callable[[str, str], dict[str, object]]] = {
        "messages": lambda prompt, answer: {"messages": turns(prompt, answer), "source": f"of {len(prompt)} letters"},
        "chat": lambda prompt, answer: {"messages": turns(prompt, answer)},
        "text": lambda prompt, answer: {"text": prompt + answer},
    }
    row = made.get(form, lambda prompt, answer: {"prompt": prompt, "completion": answer})
    rows = [row(prompt, word[:1]) for prompt, word in zip(asked, words, strict=True)]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.fixture(scope="module", params=SFT_FORMS)
def answering(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A run on conversations: on the embedded decoder with an adapter or whole, or on one with a chat template, whose
    own end of an answer is another than the one that is trained."""
    form: str = request.param
    folder = tmp_path_factory.mktemp(form)
    more = ["optimizer.lr=0.02", "adapter.r=8", *(["adapter.kind=none"] if form == "whole" else [])]
    if form == "chat":
        words = tokenizer(CHATML, eos="</s>")
        small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
        with seeded(4):
            Qwen3ForCausalLM(
                Qwen3Config(**small, **heads, vocab_size=words.vocab_size, eos_token_id=2, tie_word_embeddings=False)
            ).save_pretrained(folder / "base")
        words.save(folder / "base")
        more.append(f"model.base={folder / 'base'}")
    runs = Runs(conversations(folder, form))
    assert runs.train(folder / "run", *more, "task=sft", "training.epochs=8") == Exit.OK
    return form, folder / "run"


def answers_of_run(run: Path, most: int = 12) -> list[str]:
    """What `andon generate` prints."""
    found = []
    for prompt in PROMPTS:
        given = ["generate", str(run), prompt, "--max-new-tokens", str(most)]
        found.append(json.loads(CliRunner().invoke(app, given, catch_exceptions=False).stdout)["answer"])
    return found


def answers_of_stock(folder: Path, elsewhere: Path, most: int = 12) -> list[str]:
    """What the code of the card prints for each prompt."""
    head, _, last = code_of(folder).partition("asked = ")
    asked, _, printed = last.partition("\n")
    printed = printed.strip().removeprefix("print(").removesuffix(")").replace("256", str(most))
    lines = [f"asked = {asked.replace('a prompt', prompt)}\nfound.append({printed})" for prompt in PROMPTS]
    program = "\n".join([head, "found = []", *lines, "print(found)"])
    answers: list[str] = ast.literal_eval(alone(program, elsewhere))
    return answers


@pytest.mark.parametrize("options", [("--merge",), ()], ids=["merged", "unmerged"])
def test_stock_transformers_answers_as_the_run_does(
    answering: tuple[str, Path], tmp_path: Path, options: tuple[str, ...]
) -> None:
    """Greedy text to the letter, by the code of the card: the tokenizer begins and ends an answer as in training."""
    form, run = answering
    said = exported(run, tmp_path / "out", *options)
    ours = answers_of_run(run)
    assert answers_of_stock(tmp_path / "out", tmp_path) == ours
    ends = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    wanted = {"chat": (5, 0)}.get(form, (2, 0))
    assert (ends["eos_token_id"], ends["pad_token_id"], ends["do_sample"]) == ([wanted[0]], wanted[1], False)
    assert form == "text" or any(len(answer) < 12 for answer in ours), ours
    prompts = summary(run)["eval"]["rows"]
    if not options and form != "whole" and prompts > export.ADAPTER_PROMPTS:
        prompts = f"{export.ADAPTER_PROMPTS} of {prompts}"
    assert said[1].startswith(
        f"on {prompts} evaluation prompts, answered with 32 tokens at most, the largest difference from a logit"
    )
    assert said[1].endswith("and 0 greedy answers change")
    assert len(said) == 2
    if form == "messages" and not options:
        assert answers_of_stock(run / "adapter", tmp_path) == ours


def test_peft_by_itself_answers_as_the_run_does(answering: tuple[str, Path], tmp_path: Path) -> None:
    """An adapter on its base, given to the loader of peft; the ids of the prompts are the tokenizer's own."""
    form, run = answering
    if form not in ("messages", "chat"):
        return
    exported(run, tmp_path / "out")
    base = tmp_path / "out" / "base" if form != "chat" else run.parent / "base"
    frame = {"messages": "user: {}\nassistant: ", "chat": "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"}
    program = f"""
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
base = AutoModelForCausalLM.from_pretrained({str(base)!r})
model = PeftModel.from_pretrained(base, {str(tmp_path / "out")!r}).eval()
tokenizer = AutoTokenizer.from_pretrained({str(tmp_path / "out")!r})
ends = GenerationConfig.from_pretrained({str(tmp_path / "out")!r}, max_new_tokens=12)
found = []
for prompt in {[frame[form].format(prompt) for prompt in PROMPTS]!r}:
    given = tokenizer(prompt, return_tensors="pt")
    ids = model.generate(input_ids=given["input_ids"], attention_mask=given["attention_mask"], generation_config=ends)
    found.append(tokenizer.decode(ids[0, given["input_ids"].shape[1]:], skip_special_tokens=True))
print(found)
"""
    assert ast.literal_eval(alone(program, tmp_path)) == answers_of_run(run)


def test_the_card_of_one_that_answers_tells_its_record(answering: tuple[str, Path], tmp_path: Path) -> None:
    """Scores with their counts, by source too, and a command that gives the same weights again."""
    form, run = answering
    exported(run, tmp_path / "out")
    text, found = (tmp_path / "out" / "README.md").read_text(), summary(run)["eval"]
    data = ModelCard(text).data
    assert data.to_dict()["pipeline_tag"] == "text-generation"
    told = {each.metric_name: each.metric_value for each in data.eval_results or ()}
    assert told == {"exact match": found["exact_match"], "perplexity": found["perplexity"]}
    rows, tokens = found["rows"], found["tokens"]
    assert f"| exact match | {found['exact_match']:.4f} | {found['exact_match'] * rows:.0f} of {rows} rows |" in text
    right = found["token_accuracy"] * tokens
    assert f"| {found['token_accuracy']:.4f} | {right:.0f} of {tokens} trained tokens |" in text
    for name, one in found["sources"].items():
        assert f"| `{name}` | {one['rows']} | {one['tokens']} | {one['loss']:.4f} |" in text
    assert bool(found["sources"]) == (form == "messages")
    if form in ("messages", "chat"):
        command = next(line.strip() for line in text.splitlines() if line.startswith("    andon train "))
        shutil.copy(run.parent / "talk.jsonl", tmp_path)
        if form == "chat":
            shutil.copytree(run.parent / "base", tmp_path / "base")
        ended = andon(*shlex.split(command)[1:], "--run-dir", "again", folder=tmp_path)
        assert ended.code == 0, ended.said
        assert outcome(tmp_path / "again") == outcome(run)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of prompts and completions on the embedded decoder."""
    folder = tmp_path_factory.mktemp("one")
    more = ("optimizer.lr=0.02", "adapter.r=8", "training.epochs=4")
    assert Runs(conversations(folder, "prompts")).train(folder / "run", *more) == Exit.OK
    return folder / "run"


def test_what_bfloat16_changes_of_answers_is_said(one: Path, tmp_path: Path) -> None:
    """The drift that is printed, and stands in the card, is the one that transformers sees between the merge in fp32
    and the one in bfloat16, along the greedy answers to the validation prompts."""
    exported(one, tmp_path / "fp32", "--merge")
    _, said = exported(one, tmp_path / "bf16", "--merge", "--dtype", "bfloat16")
    assert said in " ".join((tmp_path / "bf16" / "README.md").read_text().split())
    rows = export.rows_of(load_run(RunFolder(one)))
    assert rows is not None
    prompts = [each.messages[0].content for each in rows.evaluated_on.rows]  # type: ignore[attr-defined]
    program = f"""
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained({str(tmp_path / "fp32")!r})
whole, half = (AutoModelForCausalLM.from_pretrained({str(tmp_path)!r} + name).eval() for name in ("/fp32", "/bf16"))
largest, changed = 0.0, 0
for prompt in {prompts!r}:
    given = tokenizer(prompt, return_tensors="pt")["input_ids"]
    mask = torch.ones_like(given)
    one, other = (each.generate(given, attention_mask=mask, max_new_tokens=32) for each in (whole, half))
    changed += one.tolist() != other.tolist()
    with torch.no_grad():
        a, b = (each(one[:, :-1]).logits[0, given.shape[1] - 1 :].float() for each in (whole, half))
    largest = max(largest, float((a - b).abs().max()))
print((largest, changed, str(half.dtype)))
"""
    largest, changed, dtype = ast.literal_eval(alone(program, tmp_path))
    assert dtype == "torch.bfloat16"
    told = re.search(
        r"on (\d+) evaluation prompts, .* logit of the run is (\S+), and (\d+) greedy answers change", said
    )
    assert told is not None
    assert (int(told[1]), float(told[2]), int(told[3])) == (len(prompts), pytest.approx(largest, rel=0.1), changed)
    assert largest > 1e-4


def test_a_wrong_merge_of_one_that_answers_does_not_go_out(
    one: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Merged at half its scale an adapter gives other logits: refused, and nothing is left."""

    def halved(model: nn.Module) -> nn.Module:
        for module in model.modules():
            if isinstance(getattr(module, "scaling", None), dict):
                module.scaling = {name: value / 2 for name, value in module.scaling.items()}  # type: ignore[union-attr]
        return adapter.merged(model)

    monkeypatch.setattr(export, "merged", halved)
    with pytest.raises(RuntimeError, match="the written model is not the run's: on 4 evaluation prompts"):
        exported(one, tmp_path / "out", "--merge")
    assert tree(tmp_path) == set()


def test_what_transformers_cannot_ask_as_in_training_is_said(one: Path, tmp_path: Path) -> None:
    """Of a tokenizer that does not begin a text, as the embedded one once did not: printed, and in the card."""
    copy = shutil.copytree(one, tmp_path / "run")
    byte_tokenizer().save(copy / "adapter")
    told = "its tokenizer puts other special tokens around a text than it was trained with: answers may be others"
    assert exported(copy, tmp_path / "out")[-1] == told
    assert told in (tmp_path / "out" / "README.md").read_text()
