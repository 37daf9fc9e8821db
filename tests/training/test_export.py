"""What `andon export` writes of every task gives the run's own numbers and answers, by transformers and peft alone.

The stock libraries run in one process, in which Andon cannot be imported (`stock`).
"""

from __future__ import annotations

import ast
import json
import re
import shlex
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from transformers import BertConfig, BertForSequenceClassification, Qwen3Config, Qwen3ForCausalLM

from andon.cli.commands import app
from andon.config.schema import Config
from andon.console.messages import InputError
from andon.data.tokens import byte_tokenizer
from andon.metrics.scores import Confusion
from andon.model import adapter
from andon.model.build import seeded
from andon.run.folder import RunFolder
from andon.run.summary import Head, Summary, environment, write_provenance
from andon.training import export
from andon.training.export import EXTENTS
from andon.training.inference import load_run, predict
from andon.training.outputs import Form, write_card
from tests.cli.command import cli, tree
from tests.data.test_chat import CHATML, tokenizer
from tests.support.stock import Stock
from tests.training.kinds import IDS, KINDS, Kind
from tests.training.runs import Runs, outcome, row, summary, write_csv, write_jsonl

pytestmark = pytest.mark.xdist_group("test_export")

TEXTS = [*(row(number)[0] for number in range(6)), "größe ☃ " * 40, "two\nlines"]
"""The seventh is longer than the 128 tokens at which a run cuts."""
COLUMNS = ("data.text_column=sentence", "data.label_column=colour")
MERGE = ("--merge",)
PROMPTS = ("red?", "say it: green?", "größe ☃?")


def exported(run: Path, target: Path, *options: str | Path) -> list[str]:
    ended = CliRunner().invoke(app, ["export", *map(str, (run, target, *options))], catch_exceptions=False)
    assert ended.exit_code == 0, ended.output
    return ended.stdout.splitlines()


def code_of(folder: Path) -> str:
    found = re.search(r"## Use\n\n((?:    .*\n|\n)+)", (folder / "README.md").read_text())
    assert found is not None
    return re.sub("^    ", "", found[1], flags=re.MULTILINE).replace("THIS FOLDER", str(folder))


def repeated(run: Path, card: str, folder: Path, *needed: Path) -> None:
    """The card's command gives the weights of `run` in another folder that has the files `needed`."""
    command = next(line.strip() for line in card.splitlines() if line.startswith("    andon train "))
    for each in needed:
        shutil.copytree(each, folder / each.name) if each.is_dir() else shutil.copy(each, folder)
    ended = cli(*shlex.split(command)[1:], "--run-dir", "again", folder=folder)
    assert ended.code == 0, ended.said
    assert outcome(folder / "again") == outcome(run)


# Texts of classes


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
    tuned = (f"model.base={folder / 'base'}", "optimizer.lr=0.05", "training.keep=last")
    assert two.train(folder / "pretrained", *COLUMNS, *tuned) == 0
    return folder


def used(stock: Stock, folder: Path, texts: Sequence[str] = TEXTS) -> list[dict[str, float]]:
    """Probabilities by class of each text, by the program in the card."""
    program = code_of(folder).replace('["a text"]', repr(texts))
    return [{one["label"]: one["score"] for one in each} for each in ast.literal_eval(stock.run(program))]


def ours(run: Path) -> list[dict[str, float]]:
    trained = load_run(RunFolder(run))
    return [dict(zip(trained.labels, one.probabilities, strict=True)) for one in predict(trained, TEXTS)]


def same(found: list[dict[str, float]], wanted: list[dict[str, float]]) -> None:
    assert found == [pytest.approx(other, abs=1e-6) for other in wanted]


@pytest.mark.parametrize(
    ("kind", "options"),
    [("embedded", MERGE), ("embedded", ()), ("pretrained", MERGE), ("pretrained", ()), ("whole", MERGE)],
)
def test_stock_transformers_gives_the_runs_probabilities(
    made: Path, tmp_path: Path, stock: Stock, kind: str, options: tuple[str, ...]
) -> None:
    said = exported(made / kind, tmp_path / "out", *options)
    same(used(stock, tmp_path / "out"), ours(made / kind))
    if options:
        assert said[0] == f"wrote {tmp_path / 'out'}: a model of transformers in float32"
        assert "and 0 rows get another label" in said[1]
        assert not (tmp_path / "out" / "adapter_config.json").exists()
    else:
        same(used(stock, made / kind / "adapter"), ours(made / kind))


def test_a_run_folder_may_be_moved(made: Path, tmp_path: Path, stock: Stock) -> None:
    before = ours(made / "embedded")
    moved = tmp_path / "elsewhere" / "run"
    shutil.copytree(made / "embedded", moved)
    (made / "embedded").rename(made / "gone")
    try:
        assert ours(moved) == before
        same(used(stock, moved / "adapter"), before)
        for base, folder in ((moved / "base", moved / "adapter"), (tmp_path / "out" / "base", tmp_path / "out")):
            if not folder.exists():
                exported(moved, folder)
            reference = json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
            assert (folder / reference).resolve() == base
            assert not Path(reference).is_absolute()
            same(with_peft(stock, base, folder), before)
    finally:
        (made / "gone").rename(made / "embedded")


def with_peft(stock: Stock, base: Path, folder: Path) -> list[dict[str, float]]:
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
    found: list[dict[str, float]] = ast.literal_eval(stock.run(program))
    return found


def test_what_is_lost_in_bfloat16_is_said(made: Path, tmp_path: Path, stock: Stock) -> None:
    out = tmp_path / "out"
    _, said = exported(made / "pretrained", out, "--merge", "--dtype", "bfloat16", "--check", "full")
    assert {each.dtype for each in load_file(out / "model.safetensors").values()} == {torch.bfloat16}
    assert said in " ".join((out / "README.md").read_text().split())
    trained = load_run(RunFolder(made / "pretrained"))
    rows = export.rows_of(trained)
    assert rows is not None
    texts = list(rows.evaluated_on.texts())
    wanted = [one.probabilities for one in predict(trained, texts)]
    seen = [tuple(one[name] for name in trained.labels) for one in used(stock, out, texts)]
    largest = max(abs(a - b) for one, other in zip(wanted, seen, strict=True) for a, b in zip(one, other, strict=True))
    told = re.search(
        r"on (\d+) evaluation rows the largest difference from a probability of the run is (\S+), and (\d+) rows", said
    )
    assert told is not None
    assert (int(told[1]), float(told[2])) == (len(texts), pytest.approx(largest, rel=0.2, abs=1e-6))
    assert float(told[2]) > 1e-5


def halved(base: Any, changes: Any = adapter._changes) -> dict[str, Any]:
    """Every merged weight is halfway from the base's to what it should be."""
    return {name: lambda weight, change=change: (weight + change(weight)) / 2 for name, change in changes(base).items()}


def halved_alpha(file: Path, content: dict[str, Any], write: Any = adapter._write_json) -> None:
    write(file, content | {"lora_alpha": content["lora_alpha"] / 2} if "lora_alpha" in content else content)


@pytest.mark.parametrize(
    ("kind", "options", "part", "other"),
    [
        ("embedded", MERGE, "_changes", halved),
        ("embedded", (), "_write_json", halved_alpha),
        ("pretrained", (), "_write_json", halved_alpha),
    ],
)
def test_weights_that_are_read_otherwise_do_not_go_out(
    made: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    options: tuple[str, ...],
    part: str,
    other: Any,
) -> None:
    monkeypatch.setattr(adapter, part, other)
    rows = "8 of 12" if kind == "embedded" else r"\d+"
    with pytest.raises(RuntimeError, match=f"the written model is not the run's: on {rows} evaluation rows"):
        exported(made / kind, tmp_path / "out", *options)
    assert tree(tmp_path) == set()


def test_an_export_whose_rows_are_gone_says_what_it_did_not_measure(made: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(made / "embedded", copy)
    config = copy / "config.yaml"
    config.write_text(config.read_text().replace(str(made / "train.jsonl"), str(tmp_path / "gone.jsonl")))
    assert exported(copy, tmp_path / "out", "--merge")[1] == export.NOT_MEASURED
    assert export.NOT_MEASURED in (tmp_path / "out" / "README.md").read_text()


def test_what_cannot_be_exported_is_refused_and_leaves_nothing(made: Path, tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    for target, options, what in (
        (taken, (), "already exists"),
        (tmp_path / "no" / "out", MERGE, "does not exist"),
        (tmp_path / "out", ("--dtype", "bfloat16"), "is for --merge"),
        (tmp_path / "out", ("--merge", "--dtype", "float8"), "is not one of float32, bfloat16"),
        (tmp_path / "out", ("--check", "some"), "--check: 'some' is not one of rows, full, none"),
    ):
        with pytest.raises(InputError, match=what):
            exported(made / "embedded", target, *options)
    copy = shutil.copytree(made / "embedded", tmp_path / "run")
    (copy / "summary.json").write_text(json.dumps(summary(copy) | {"finished": False}))
    with pytest.raises(InputError, match="is not finished; resume it with: andon train"):
        exported(copy, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"taken", "run"}


def test_a_disk_that_refuses_leaves_nothing(made: Path, tmp_path: Path) -> None:
    ended = cli("export", made / "embedded", tmp_path / "out", "--merge", largest_file=8000)
    assert (ended.code, ended.out) == (2, [])
    assert "the file would be larger than the limit" in ended.said[-1]
    assert tree(tmp_path) == set()


def test_the_cards_command_gives_the_same_weights(made: Path, tmp_path: Path) -> None:
    text = (made / "pretrained" / "adapter" / "README.md").read_text()
    assert "base_model" not in ModelCard(text).data.to_dict()
    repeated(made / "pretrained", text, tmp_path, made / "two.csv", made / "base")


def test_names_of_others_are_but_names_in_a_card(tmp_path: Path) -> None:
    names = ("a|b", "`c`", "<script>", "\x1b]0;x\x07", "---\nlicense: mine", "**f**")
    found = {"rows": 6, "accuracy": 0.5, "classes": []}
    matrix = Confusion(6, tuple((i, j, 1) for i in range(6) for j in range(6)))
    head, digests = Head(1, "0" * 16), {"data": "d" * 64, "base": "b" * 16, "initial_weights": "i" * 16}
    result = Summary("run", True, "finished", 2, 1, "inline", "0" * 16, "0" * 16, {}, 0, 1.0, head, {}, eval=found)
    result, config = replace(result, labels=names), Config.model_validate({"data": {"train": "x\nlicense: mine.csv"}})
    write_provenance(RunFolder(tmp_path).provenance, identity="", digests=digests, environment=environment())
    title, tokens = "# <b>\nlicense: x", byte_tokenizer()
    write_card(tmp_path, RunFolder(tmp_path), config, result, 7, matrix, Form.WHOLE, title, tokens, None)
    text = (tmp_path / "README.md").read_text()
    data: dict[str, Any] = ModelCard(text).data.to_dict()
    assert "license" not in data
    assert data["library_name"] == "transformers"
    lines = text.splitlines()
    assert not any(mark in text for mark in "\x1b\x07")
    assert not any(line.startswith("license") for line in lines)
    assert sum(line == "---" for line in lines) == 2
    rows = [line.replace("\\|", "") for line in lines if line.startswith("| `") and "held" not in line]
    assert {row.count("|") for row in rows if row.count("|") > 3} == {len(names) + 2}
    assert "# \\# \\<b\\>\\\\nlicense: x" in text


# Texts that get a number, several labels, a tag for each word; pairs of texts


def base_of(kind: Kind, folder: Path) -> Path:
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    others = {"num_labels": 5, "problem_type": "regression"}
    with seeded(3):
        BertForSequenceClassification(BertConfig(**small, **others, vocab_size=260)).save_pretrained(folder)
    byte_tokenizer(pairs=kind.name == "pairs").save(folder)
    return folder


@pytest.fixture(scope="module", params=KINDS, ids=IDS)
def of_kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Kind, Path]:
    """A task, and runs of it on the embedded decoder and on an encoder, both learned far enough to matter."""
    kind = request.param
    folder = tmp_path_factory.mktemp(kind.name or kind.task)
    runs, base = kind.written(folder), base_of(kind, folder / "base")
    for name, more in (("embedded", ()), ("pretrained", (f"model.base={base}",))):
        assert runs.train(folder / name, f"task={kind.task}", "optimizer.lr=0.05", *more) == 0
    return kind, folder


def asked_rows(folder: Path) -> list[dict[str, Any]]:
    """Eight rows of input; the last is longer than the 128 tokens at which a run cuts."""
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()[:8]]
    rows[-1]["tokens" if "tokens" in rows[-1] else "text"] *= 30 if "tokens" in rows[-1] else 8
    return [{key: row[key] for key in ("text", "about", "tokens") if key in row} for row in rows]


def told_by_run(run: Path, rows: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    (folder / "asked.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    ended = cli("predict", run, folder / "asked.jsonl", "--all-scores", "--output", folder / "told.jsonl")
    assert ended.code == 0, ended.said
    return [json.loads(line) for line in (folder / "told.jsonl").read_text().splitlines()]


def told_by_stock(stock: Stock, folder: Path, rows: list[dict[str, Any]]) -> Any:
    """By the program of the card: of each row its scores by label, or the tag of each of its words."""
    code = code_of(folder)
    if "tokens" in rows[0]:
        texts = [" ".join(row["tokens"]) for row in rows]
        code = code.replace("print(word[0], ", "found.append(").replace("found.append", "found[-1].append")
        code = code.replace('in ["a text"]:', f"in {texts!r}:\n    found.append([])")
        return ast.literal_eval(stock.run(f"found = []\n{code}\nprint(found)"))
    given = [{"text": row["text"], "text_pair": row["about"]} if "about" in row else row["text"] for row in rows]
    code = re.sub(r"use\(\[.*\], top_k", lambda _: f"use({given!r}, top_k", code)
    return [{one["label"]: one["score"] for one in each} for each in ast.literal_eval(stock.run(code))]


@pytest.mark.parametrize(("run", "options"), [("embedded", ()), ("pretrained", ()), ("pretrained", MERGE)])
def test_stock_transformers_says_what_the_run_says(
    of_kind: tuple[Kind, Path], tmp_path: Path, stock: Stock, run: str, options: tuple[str, ...]
) -> None:
    """A base that was trained on another problem does not decide how its outputs are read."""
    kind, folder = of_kind
    rows = asked_rows(folder)
    said = exported(folder / run, tmp_path / "out", *options)
    own, theirs = told_by_run(folder / run, rows, tmp_path), told_by_stock(stock, tmp_path / "out", rows)
    if kind.task == "token-classification":
        assert theirs == [row["tags"] for row in own]
        assert None in own[-1]["tags"]
    elif kind.task == "regression":
        assert [row["value"] for row in theirs] == pytest.approx([row["value"] for row in own], abs=1e-5)
    else:
        assert theirs == [pytest.approx(row["scores"], abs=1e-6) for row in own]
    if options:
        whats = {"regression": "from a number of the run", "token-classification": "0 words get another tag"}
        assert whats.get(kind.task, "0 rows get ") in said[1]


SCORES = {
    "regression": {"RMSE": "rmse", "MAE": "mae", "Pearson": "pearson", "Spearman": "spearman"},
    "multi-label": {"all labels right": "subset_accuracy", "micro-F1": "micro_f1", "macro-F1": "macro_f1"},
    "token-classification": {"F1": "f1", "precision": "precision", "recall": "recall", "word accuracy": "accuracy"},
    "classification": {"accuracy": "accuracy", "macro-F1": "macro_f1", "MCC": "mcc", "AUROC": "auroc"},
}


TYPES = {"accuracy": "accuracy", "macro-F1": "f1", "MCC": "matthews_correlation", "AUROC": "roc_auc"}


def test_the_card_has_the_scores_and_a_command_that_repeats_the_run(of_kind: tuple[Kind, Path], tmp_path: Path) -> None:
    kind, folder = of_kind
    exported(folder / "embedded", tmp_path / "out")
    text, found = (tmp_path / "out" / "README.md").read_text(), summary(folder / "embedded")["eval"]
    data = ModelCard(text).data
    tag = "token-classification" if kind.task == "token-classification" else "text-classification"
    assert (data.to_dict()["pipeline_tag"], data.to_dict()["library_name"]) == (tag, "peft")
    told = {each.metric_name: each.metric_value for each in data.eval_results or ()}
    if kind.task == "classification":
        types = {each.metric_name: each.metric_type for each in data.eval_results or ()}
        assert types == {name: TYPES[name] for name in told}
    assert told == {name: found[key] for name, key in SCORES[kind.task].items() if found[key] is not None}
    share = {"multi-label": "subset_accuracy", "regression": "rmse"}.get(kind.task, "accuracy")
    count = found.get("words", found["rows"])
    unit = "words" if "words" in found else "rows"
    of = f"{count} {unit}" if kind.task == "regression" else f"{found[share] * count:.0f} of {count} {unit}"
    assert f"| {found[share]:.4f} | {of} |" in text
    assert f"`{summary(folder / 'embedded')['weights_digest']}`, on 1 inline worker |" in text
    own = (folder / "embedded" / "adapter" / "README.md").read_text()
    assert not any(str(place) in each for place in (folder, tmp_path) for each in (text, own))
    repeated(folder / "embedded", text, tmp_path, folder / "rows.jsonl")


def test_a_base_in_another_unit_is_held_to_its_own_size(tmp_path: Path) -> None:
    """Numbers around a million differ by more than a thousandth in fp32, which is rounding and nothing else."""
    large = replace(KINDS[0], rows=lambda place: KINDS[0].rows(place) | {"label": 1e6 + place})
    assert large.written(tmp_path).train(tmp_path / "run") == 0
    run = load_run(RunFolder(tmp_path / "run"))
    for name, parameter in run.model.named_parameters():
        if "modules_to_save" in name:
            parameter.data *= 1e6
    (said,) = export.export_run(run, tmp_path / "out", "float32")
    assert "from a number of the run" in said


# Conversations

ROWS: dict[str, Callable[[str, str], dict[str, object]]] = {
    "messages": lambda prompt, answer: {"messages": turns(prompt, answer), "source": f"of {len(prompt)} letters"},
    "chat": lambda prompt, answer: {"messages": turns(prompt, answer)},
    "text": lambda prompt, answer: {"text": prompt + answer},
    "whole": lambda prompt, answer: {"prompt": prompt, "completion": answer},
}


def turns(prompt: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


def conversations(folder: Path, form: str, answer: str = "{}") -> Runs:
    """Runs on rows whose answer has the first letter of the word in the prompt."""
    path = folder / "talk.jsonl"
    words = [("red", "green", "blue")[number % 3] for number in range(45)]
    asked = [f"{'say it: ' * (number % 2)}{word}?" for number, word in enumerate(words)]
    rows = [ROWS[form](prompt, answer.format(word[:1])) for prompt, word in zip(asked, words, strict=True)]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return Runs(path)


def chat_base(folder: Path) -> None:
    """A decoder with a chat template. Its end-of-text token is not the token that ends a trained answer."""
    words = tokenizer(CHATML, eos="</s>")
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    with seeded(4):
        Qwen3ForCausalLM(
            Qwen3Config(**small, **heads, vocab_size=words.vocab_size, eos_token_id=2, tie_word_embeddings=False)
        ).save_pretrained(folder)
    words.save(folder)


@pytest.fixture(scope="module")
def answering(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Gives the run on conversations of a form: `whole` on the embedded decoder, `chat` on a base, or an adapter."""

    @cache
    def run(form: str) -> Path:
        folder = tmp_path_factory.mktemp(form)
        more = ["optimizer.lr=0.04", "adapter.r=8", *(["adapter.kind=none"] if form == "whole" else [])]
        if form == "chat":
            chat_base(folder / "base")
            more.append(f"model.base={folder / 'base'}")
        assert conversations(folder, form).train(folder / "run", *more, "task=sft", "training.epochs=4") == 0
        return folder / "run"

    return run


def answers_of_run(run: Path, most: int = 12) -> list[str]:
    ended = [cli("generate", run, prompt, "--max-new-tokens", str(most)) for prompt in PROMPTS]
    return [json.loads("\n".join(each.out))["answer"] for each in ended]


def answers_of_stock(stock: Stock, folder: Path, most: int = 12) -> list[str]:
    head, _, last = code_of(folder).partition("asked = ")
    asked, _, printed = last.partition("\n")
    printed = printed.strip().removeprefix("print(").removesuffix(")").replace("256", str(most))
    lines = [f"asked = {asked.replace('a prompt', prompt)}\nfound.append({printed})" for prompt in PROMPTS]
    answers: list[str] = ast.literal_eval(stock.run("\n".join([head, "found = []", *lines, "print(found)"])))
    return answers


# The other forms: the same code from the run on, so that the rows of `messages` and `chat` by default show it.
@pytest.mark.parametrize(
    ("form", "options"),
    [
        *(("messages", MERGE), ("messages", ()), ("chat", ())),
        *(pytest.param(form, (), marks=pytest.mark.deep) for form in ("text", "whole")),
        pytest.param("chat", MERGE, marks=pytest.mark.deep),
    ],
)
def test_stock_transformers_answers_as_the_run_does(
    answering: Callable[[str], Path], tmp_path: Path, stock: Stock, form: str, options: tuple[str, ...]
) -> None:
    run = answering(form)
    said = exported(run, tmp_path / "out", *options)
    own = answers_of_run(run)
    assert answers_of_stock(stock, tmp_path / "out") == own
    ends = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    wanted = {"chat": (5, 0)}.get(form, (2, 0))
    assert (ends["eos_token_id"], ends["pad_token_id"], ends["do_sample"]) == ([wanted[0]], wanted[1], False)
    assert form == "text" or any(len(answer) < 12 for answer in own), own
    prompts = summary(run)["eval"]["rows"]
    if prompts > EXTENTS["rows"][1]:
        prompts = f"{EXTENTS['rows'][1]} of {prompts}"
    assert said[1].startswith(
        f"on {prompts} evaluation prompts, answered with 8 tokens at most, the largest difference from a logit"
    )
    assert said[1].endswith("and 0 greedy answers change")
    assert len(said) == 2
    if form == "messages" and not options:
        assert answers_of_stock(stock, run / "adapter") == own


def test_the_card_of_one_that_answers_tells_its_record(answering: Callable[[str], Path], tmp_path: Path) -> None:
    run = answering("messages")
    text, found = (run / "adapter" / "README.md").read_text(), summary(run)["eval"]
    data = ModelCard(text).data
    assert data.to_dict()["pipeline_tag"] == "text-generation"
    told = {each.metric_name: each.metric_value for each in data.eval_results or ()}
    assert told == {"exact match": found["exact_match"], "perplexity": found["perplexity"]}
    rows, tokens = found["rows"], found["tokens"]
    assert f"| exact match | {found['exact_match']:.4f} | {found['exact_match'] * rows:.0f} of {rows} rows |" in text
    right = found["token_accuracy"] * tokens
    assert f"| {found['token_accuracy']:.4f} | {right:.0f} of {tokens} trained tokens |" in text
    assert found["sources"]
    for name, one in found["sources"].items():
        assert f"| `{name}` | {one['rows']} | {one['tokens']} | {one['loss']:.4f} |" in text
    repeated(run, text, tmp_path, run.parent / "talk.jsonl")


def test_an_answering_model_is_compared_by_its_logits(
    answering: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, said = exported(answering("messages"), tmp_path / "out", "--merge", "--dtype", "bfloat16")
    assert {each.dtype for each in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.bfloat16}
    found = re.search(r"on 4 evaluation prompts, .* the largest difference from a logit of the run is ([\d.e-]+)", said)
    assert found is not None, said
    assert float(found[1]) > 1e-4
    monkeypatch.setattr(adapter, "_changes", halved)
    with pytest.raises(RuntimeError, match="the written model is not the run's: on 4 evaluation prompts"):
        exported(answering("messages"), tmp_path / "wrong", "--merge")
    assert not (tmp_path / "wrong").exists()


def test_what_transformers_cannot_ask_as_in_training_is_said(answering: Callable[[str], Path], tmp_path: Path) -> None:
    copy = shutil.copytree(answering("messages"), tmp_path / "run")
    byte_tokenizer().save(copy / "adapter")
    told = "its tokenizer puts other special tokens around a text than it was trained with: answers may be others"
    assert exported(copy, tmp_path / "out")[-1] == told
    assert told in (tmp_path / "out" / "README.md").read_text()
