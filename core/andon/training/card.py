"""The card of a result: what a model is, what it was made from, how good it is, and the command that makes it again.

Markdown behind a YAML header as model hubs read it, from the run's own record alone. It goes to others with the model:
no path of the machine it was made on stands in it.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import yaml

from andon.config.identity import differences, identity
from andon.config.schema import Config
from andon.run.provenance import Provenance
from andon_contracts.legible import legible_line

_MOST_LABELS, _MOST_COLUMNS = 20, 10
"""Classes that are listed, and up to which the confusion matrix is shown."""
_SCORES = {
    "accuracy": ("accuracy", "accuracy"),
    "macro_f1": ("macro-F1", "f1"),
    "mcc": ("MCC", "matthews_correlation"),
    "auroc": ("AUROC", "roc_auc"),
    "exact_match": ("exact match", "exact_match"),
    "perplexity": ("perplexity", "perplexity"),
    "token_accuracy": ("token accuracy", ""),
    "loss": ("loss", ""),
}
"""What is told of scores, where they have it: the word for it, and its name as a metric of the hub."""
_VERSIONS = ("python", "torch", "transformers", "peft", "numpy")


class Form(Enum):
    """What lies in the folder of a card."""

    ADAPTER = "adapter"
    """What was trained alone: its base is elsewhere."""
    COMPLETE = "complete"
    """An adapter with its base beside it, in one folder."""
    WHOLE = "whole"
    """A model of which every weight was trained."""
    MERGED = "merged"
    """A base with the adapter added to its weights."""


@dataclass(frozen=True)
class Result:
    """What a run came to.

    labels: the classes by id. rows: that were trained on. scores: as JSON, of the rows that `evaluated_on` names.
    weights: the digest of what was trained, 16 hex digits; it came out on `world_size` ranks of `backend`.
    """

    labels: tuple[str, ...]
    rows: int
    steps: int
    scores: Mapping[str, Any]
    evaluated_on: str
    weights: str
    world_size: int
    backend: str


def card(config: Config, provenance: Provenance, result: Result, form: Form, name: str, note: str = "") -> str:
    """The text of a README.md. name: of the model. note: what else is to be said of it, a paragraph."""
    base = _base(config)
    head = " with a head" if result.labels else ""
    made = {
        Form.ADAPTER: f"A LoRA adapter of rank {config.adapter.r}{head} on {base}",
        Form.COMPLETE: f"A LoRA adapter of rank {config.adapter.r}{head}, and its base, {base}",
        Form.WHOLE: f"Made from {base} by training all of its weights",
        Form.MERGED: f"This is {base} with a LoRA adapter of rank {config.adapter.r} merged into it",
    }[form]
    header = yaml.safe_dump(_header(config, provenance, result, form, name), sort_keys=False, allow_unicode=True)
    told = f" It tells {len(result.labels)} classes apart: {_listed(result.labels)}." if result.labels else ""
    named = " `labels.json` names the classes in the order of their numbers." if result.labels else ""
    cut = f"Texts are cut to {config.model.max_length} tokens, as in training."
    parts = [
        f"---\n{header}---",
        f"# {_plain(name)}",
        f"{made}.{told} Trained by Andon on {result.rows} rows, {result.steps} steps.",
        note,
        "## Use",
        _use(form, _task(result)),
        f"{cut}{named}",
        "## Scores",
        *_scores(result, _evaluated(config)),
        "## Where it comes from",
        *_origin(config, provenance, result),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _header(config: Config, provenance: Provenance, result: Result, form: Form, name: str) -> dict[str, Any]:
    """The YAML header: what a hub sorts models by, and the scores as its model-index has them."""
    header: dict[str, Any] = {
        "library_name": "transformers" if form in (Form.WHOLE, Form.MERGED) else "peft",
        "pipeline_tag": _task(result),
        "tags": ["andon", *(["lora"] if form in (Form.ADAPTER, Form.COMPLETE) else [])],
    }
    if _is_hub_id(config.model.base):
        header["base_model"] = config.model.base
    metrics = [
        {"type": type_, "name": word, "value": result.scores[key]}
        for key, (word, type_) in _SCORES.items()
        if type_ and result.scores.get(key) is not None
    ]
    dataset = {
        "name": _evaluated(config),
        "type": _task(result),
        "split": result.evaluated_on,
        "args": {"rows": result.scores.get("rows"), "sha256": _digests(provenance)[-1]},
    }
    task = {"type": _task(result), "name": _task(result).replace("-", " ").title()}
    if metrics:
        header["model-index"] = [{"name": name, "results": [{"task": task, "dataset": dataset, "metrics": metrics}]}]
    return header


def _task(result: Result) -> str:
    """The hub's word for what a model does."""
    return "text-classification" if result.labels else "text-generation"


def _use(form: Form, task: str) -> str:
    if task == "text-generation":
        return _block("from transformers import pipeline", "", f'print(pipeline("{task}", "THIS FOLDER")("a text"))')
    if form is not Form.ADAPTER:
        return _block(
            "from transformers import pipeline",
            "",
            f'classify = pipeline("{task}", "THIS FOLDER", truncation=True)',
            'print(classify(["a text"], top_k=None))',
        )
    return _block(
        "from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, pipeline",
        "",
        'folder = "THIS FOLDER"',
        'config = AutoConfig.from_pretrained(f"{folder}/classifier.json")  # the classes, which the base does not know',
        "model = AutoModelForSequenceClassification.from_pretrained(",
        "    folder, config=config, ignore_mismatched_sizes=True  # a base may have a head of its own",
        ")",
        "tokenizer = AutoTokenizer.from_pretrained(folder)",
        f'classify = pipeline("{task}", model, tokenizer=tokenizer, truncation=True)',
        'print(classify(["a text"], top_k=None))',
    )


def _scores(result: Result, data: str) -> Iterator[str]:
    found = result.scores
    rows = found.get("rows")
    yield f"Of the {rows} {result.evaluated_on} rows of {_code(data)}:"
    confusion: Sequence[Sequence[int]] = found.get("confusion") or ()
    right = sum(row[place] for place, row in enumerate(confusion))
    counts = {"accuracy": f"{right} of {rows} rows", "macro_f1": f"mean of {len(result.labels)} classes"}
    if "tokens" in found:
        counts |= dict.fromkeys(("loss", "perplexity", "token_accuracy"), f"{found['tokens']} trained tokens")
    yield _table(
        ("score", "value", "of"),
        [
            (word, f"{found[key]:.4f}", counts.get(key, f"{rows} rows"))
            for key, (word, _) in _SCORES.items()
            if found.get(key) is not None
        ],
    )
    classes = list(zip(result.labels, found.get("classes") or (), strict=False))
    if classes and len(classes) <= _MOST_LABELS:
        names = ("precision", "recall", "f1")
        lines = [(_code(label), *(f"{one[name]:.4f}" for name in names), one["support"]) for label, one in classes]
        yield _table(("class", "precision", "recall", "F1", "rows"), lines)
    if confusion and len(confusion) <= _MOST_COLUMNS:
        yield "Rows of each class (down) by what they were taken for (across):"
        lines = [(_code(label), *row) for label, row in zip(result.labels, confusion, strict=True)]
        yield _table(("", *map(_code, result.labels)), lines)


def _origin(config: Config, provenance: Provenance, result: Result) -> Iterator[str]:
    versions = {name: provenance.fingerprint[name] for name in _VERSIONS if name in provenance.fingerprint}
    devices = provenance.fingerprint.get("devices")
    facts = {
        "rows trained and validated on, SHA-256": _code(_digests(provenance)[0]),
        "rows evaluated on, SHA-256": "".join(map(_code, _digests(provenance)[1:])),
        "base model, digest": _code(provenance.digest("base")),
        "trained weights, digest": f"{_code(result.weights)}, on {result.world_size} {result.backend} workers",
        "first weights, digest": _code(provenance.digest("initial_weights")),
        "versions": ", ".join(f"{name} {_plain(version)}" for name, version in versions.items()),
        "machine": _plain(devices or provenance.fingerprint.get("cpu", "unknown")),
        "commit of Andon": _code(provenance.commit) if provenance.commit else "",
    }
    yield _table(("what", "value"), [(what, value) for what, value in facts.items() if value])
    workers = "any number of workers of one kind of device" if config.training.exact else "as many workers"
    yield f"The same weights come from the same rows and base, with these versions on {workers}, by:"
    yield _block(_command(config, result))


def _command(config: Config, result: Result) -> str:
    """What makes the run again where its files and its base lie in the working folder."""
    named = {
        "--data": config.data.train and Path(config.data.train).name,
        "--eval-data": config.data.eval and Path(config.data.eval).name,
        "--text-column": config.data.text_column,
        "--label-column": config.data.label_column,
        "--model": config.model.base if _is_hub_id(config.model.base) else _name(config.model.base),
        "--workers": str(result.world_size),
        "--backend": result.backend,
    }
    words = ["andon", "train", *(word for flag, value in named.items() if value for word in (flag, value))]
    for key, _, value in differences(identity(Config()), identity(config)):
        if not key.startswith("run.") and not key.endswith(".embedded"):
            words += ["--set", f"{key}={json.dumps(value)}"]
    return " ".join(shlex.quote(legible_line(word)) for word in words)


def _base(config: Config) -> str:
    model = config.model
    if model.base is None:
        layers = f"{model.num_hidden_layers} layer{'s' * (model.num_hidden_layers != 1)}"
        sizes = f"{layers} of width {model.hidden_size}, drawn from seed {config.seed}"
        return f"the {model.architecture} that Andon embeds ({sizes})"
    return _code(model.base if _is_hub_id(model.base) else str(_name(model.base)))


def _is_hub_id(base: str | None) -> bool:
    """Whether a run's base is a name on a hub: folders stand in its configuration by whole paths."""
    return base is not None and not base.startswith(("/", "~", "."))


def _name(path: str | None) -> str | None:
    return None if path is None else Path(path).name


def _evaluated(config: Config) -> str:
    path = config.data.eval or config.data.train
    return Path(path).name if path else "the rows that Andon embeds"


def _digests(provenance: Provenance) -> list[str]:
    """SHA-256 of the texts and classes in order: of the rows to train on, and of those to evaluate on, if apart."""
    both = provenance.digest("data")
    return [both[:64], both[64:]] if len(both) > 64 else [both]


def _listed(labels: Sequence[str]) -> str:
    more = f" and {len(labels) - _MOST_LABELS} more" if len(labels) > _MOST_LABELS else ""
    return ", ".join(map(_code, labels[:_MOST_LABELS])) + more


def _plain(text: str) -> str:
    """Text of others as Markdown that means nothing but its letters, on one line."""
    return "".join(f"\\{letter}" if letter in "\\`*_[]<>#|" else letter for letter in legible_line(text))


def _code(text: str) -> str:
    """`text` as it is written, between backticks; one of its own becomes an apostrophe."""
    return f"`{legible_line(text).replace('`', chr(39)).replace('|', chr(92) + '|')}`"


def _block(*lines: str) -> str:
    return "\n".join(f"    {line}".rstrip() for line in lines)


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
