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
from andon.config.schema import CLASSIFICATION, MULTI_LABEL, REGRESSION, SFT, TOKEN_CLASSIFICATION, Config
from andon.data.chat import Asking
from andon.data.origins import short_names
from andon.metrics.confusion import Confusion
from andon.run.provenance import Provenance
from andon.run.summary import HELD_OUT
from andon.training.card_use import PIPELINES, use
from andon.training.choices import automatic_keys
from andon_contracts.legible import legible_line

_MOST_LABELS, _MOST_COLUMNS = 20, 10
"""Classes that are listed, and up to which the confusion matrix is shown."""


@dataclass(frozen=True)
class _Score:
    """A score that is told: its key, the word for it, its name as a metric of the hub, and what it is of.

    of: the key of `_counts`. share: the score is a share of these, and is told as a count too.
    """

    key: str
    word: str
    hub: str = ""
    of: str = "rows"
    share: bool = False


_SCORES: Mapping[str, tuple[_Score, ...]] = {
    CLASSIFICATION: (
        _Score("accuracy", "accuracy", "accuracy", share=True),
        _Score("macro_f1", "macro-F1", "f1", "each"),
        _Score("mcc", "MCC", "matthews_correlation"),
        _Score("auroc", "AUROC", "roc_auc"),
        _Score("loss", "loss"),
    ),
    REGRESSION: (
        _Score("rmse", "RMSE", "rmse"),
        _Score("mae", "MAE", "mae"),
        _Score("pearson", "Pearson", "pearsonr"),
        _Score("spearman", "Spearman", "spearmanr"),
        _Score("loss", "loss (mean squared error)"),
    ),
    MULTI_LABEL: (
        _Score("micro_f1", "micro-F1", "f1", "true"),
        _Score("macro_f1", "macro-F1", "f1", "each"),
        _Score("subset_accuracy", "all labels right", "accuracy", share=True),
        _Score("loss", "loss", of="pairs"),
    ),
    TOKEN_CLASSIFICATION: (
        _Score("f1", "F1", "f1", "spans"),
        _Score("precision", "precision", "precision", "spans"),
        _Score("recall", "recall", "recall", "spans"),
        _Score("accuracy", "word accuracy", "accuracy", "words", share=True),
        _Score("loss", "loss", of="words"),
    ),
    SFT: (
        _Score("exact_match", "exact match", "exact_match", share=True),
        _Score("perplexity", "perplexity", "perplexity", "tokens"),
        _Score("token_accuracy", "token accuracy", of="tokens", share=True),
        _Score("loss", "loss", of="tokens"),
    ),
}
"""By the task's name, what is told where a run has it."""
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

    labels: the classes by id. rows: that were trained on. kept_step: the step of the weights if the validation loss
    chose their checkpoint; None: they are the last step's. scores: as JSON, of the rows that `evaluated_on` names, and
    `confusion` the confusion matrix of these rows, if the task has one.
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
    confusion: Confusion | None = None
    kept_step: int | None = None


def card(
    config: Config,
    provenance: Provenance,
    result: Result,
    form: Form,
    name: str,
    note: str = "",
    asking: Asking | None = None,
) -> str:
    """The text of a README.md. name: of the model. note: what else is to be said of it, a paragraph. asking: how one
    that answers is asked."""
    base = _base(config)
    head = " with a head" if result.labels else ""
    units = "packs of rows" if config.training.packing else "rows"
    made = {
        Form.ADAPTER: f"A LoRA adapter of rank {config.adapter.r}{head} on {base}",
        Form.COMPLETE: f"A LoRA adapter of rank {config.adapter.r}{head}, and its base, {base}",
        Form.WHOLE: f"Made from {base} by training all of its weights",
        Form.MERGED: f"This is {base} with a LoRA adapter of rank {config.adapter.r} merged into it",
    }[form]
    header = yaml.safe_dump(_header(config, provenance, result, form, name), sort_keys=False, allow_unicode=True)
    parts = [
        f"---\n{header}---",
        f"# {_plain(name)}",
        f"{made}. {_told(config, result)} Trained by Andon on {result.rows} {units}, {result.steps} steps.",
        note,
        "## Use",
        use(config, alone=form is Form.ADAPTER, asking=asking),
        _of_use(config, result, asking),
        "## Scores",
        *_scores(result, _task(config), _evaluated(config)),
        "## Where it comes from",
        *_origin(config, provenance, result),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _told(config: Config, result: Result) -> str:
    paired, count = config.data.text_pair_column is not None, len(result.labels)
    of = "a pair of texts" if paired else "a text"
    return {
        CLASSIFICATION: f"It tells {count} classes{' of pairs of texts' * paired} apart: {_listed(result.labels)}.",
        REGRESSION: f"It gives {of} a number.",
        MULTI_LABEL: f"It says which of {count} labels are true of {of}: {_listed(result.labels)}.",
        TOKEN_CLASSIFICATION: f"It gives each word of a text one of {count} tags: {_listed(result.labels)}.",
        SFT: "It answers prompts.",
    }[_task(config)]


def _of_use(config: Config, result: Result, asking: Asking | None) -> str:
    limit = config.model.max_length
    if asking is not None:
        by = "The tokenizer has no chat template; a prompt is written as it stands here."
        by = "The tokenizer's chat template writes the messages." if asking.example is None else by
        note = f" In one thing it is not asked as in training: {asking.note}." if asking.note else ""
        ends = "`generation_config.json` has the tokens that end an answer."
        new = config.model.new_tokens
        also = f" Its tokenizer has new tokens, whose rows were trained: {_listed(new)}." if new else ""
        return f"{by} {ends} It was trained on rows of {limit} tokens at most.{also}{note}"
    kind = {
        REGRESSION: " The score is the number itself.",
        MULTI_LABEL: " Each label has a probability of its own, and is true above 0.5.",
    }.get(_task(config), "")
    what = "tags" if config.task == TOKEN_CLASSIFICATION else "labels" if config.task == MULTI_LABEL else "classes"
    named = f" `labels.json` names the {what} in the order of their numbers." if len(result.labels) > 1 else ""
    return f"Texts are cut to {limit} tokens, as in training.{kind}{named}"


def _header(config: Config, provenance: Provenance, result: Result, form: Form, name: str) -> dict[str, Any]:
    """The YAML header: what a hub sorts models by, and the scores as its model-index has them."""
    pipeline = PIPELINES[_task(config)]
    header: dict[str, Any] = {
        "library_name": "transformers" if form in (Form.WHOLE, Form.MERGED) else "peft",
        "pipeline_tag": pipeline,
        "tags": ["andon", *(["lora"] if form in (Form.ADAPTER, Form.COMPLETE) else [])],
    }
    if _is_hub_id(config.model.base):
        header["base_model"] = config.model.base
    metrics = [
        {"type": score.hub, "name": score.word, "value": result.scores[score.key]}
        for score in _SCORES[_task(config)]
        if score.hub and result.scores.get(score.key) is not None
    ]
    dataset = {
        "name": _evaluated(config),
        "type": pipeline,
        "split": result.evaluated_on,
        "args": {"rows": result.scores.get("rows"), "sha256": _digests(provenance)[-1]},
    }
    task = {"type": pipeline, "name": pipeline.replace("-", " ").title()}
    if metrics:
        header["model-index"] = [{"name": name, "results": [{"task": task, "dataset": dataset, "metrics": metrics}]}]
    return header


def _task(config: Config) -> str:
    return config.task or CLASSIFICATION


def _counts(task: str, result: Result) -> dict[str, tuple[int, str]]:
    found = result.scores
    rows, tokens, words = (int(found.get(key) or 0) for key in ("rows", "tokens", "words"))
    each, things = len(result.labels), "labels" if task == MULTI_LABEL else "classes"
    support = sum(one["support"] for _, one in _by_class(result))
    return {
        "rows": (rows, f"{rows} rows"),
        "each": (each, f"mean of {each} {things}"),
        "true": (support, f"{support} labels of {rows} rows"),
        "pairs": (rows * each, f"{rows} rows times {each} labels"),
        "spans": (support, f"{support} spans"),
        "words": (words, f"{words} words"),
        "tokens": (tokens, f"{tokens} trained tokens"),
    }


def _by_class(result: Result) -> list[tuple[str, Mapping[str, Any]]]:
    types: Mapping[str, Mapping[str, Any]] = result.scores.get("types") or {}
    return [*zip(result.labels, result.scores.get("classes") or (), strict=False), *types.items()]


def _scores(result: Result, task: str, data: str) -> Iterator[str]:
    found, counts = result.scores, _counts(task, result)
    yield f"Of the {found.get('rows')} {result.evaluated_on} rows of {_code(data)}:"
    if result.kept_step is not None:
        same = "" if result.evaluated_on == HELD_OUT else " These scores are of the same rows: they flatter."
        yield f"The validation loss chose the checkpoint of step {result.kept_step} of {result.steps}.{same}"

    def of(score: _Score) -> str:
        count, words = counts[score.of]
        return f"{round(found[score.key] * count)} of {words}" if score.share else words

    told = [each for each in _SCORES[task] if found.get(each.key) is not None]
    yield _table(("score", "value", "of"), [(each.word, f"{found[each.key]:.4f}", of(each)) for each in told])
    classes = _by_class(result)
    if classes and len(classes) <= _MOST_LABELS:
        names = ("precision", "recall", "f1")
        lines = [(_code(label), *(f"{one[name]:.4f}" for name in names), one["support"]) for label, one in classes]
        what = {MULTI_LABEL: ("label", "rows"), TOKEN_CLASSIFICATION: ("type", "spans")}.get(task, ("class", "rows"))
        yield _table((what[0], "precision", "recall", "F1", what[1]), lines)
    sources: Mapping[str, Mapping[str, Any]] = found.get("sources") or {}
    if sources and len(sources) <= _MOST_LABELS:
        each = next(iter(sources.values()))
        own = sorted((score for score in _SCORES[task] if score.key in each), key=lambda score: score.key != "loss")
        tokens = [("tokens", "trained tokens")] if "tokens" in each else []
        words = ("source", "rows", *(word for _, word in tokens), *(score.word for score in own))
        lines = []
        for name, one in sources.items():
            scores = [one.get(score.key) for score in own]
            shown = ["" if score is None else f"{score:.4f}" for score in scores]
            lines.append((_code(name), one["rows"], *(one[key] for key, _ in tokens), *shown))
        yield _table(words, lines)
    if result.confusion is not None and result.confusion.classes <= _MOST_COLUMNS:
        yield "Rows of each class (down) by what they were taken for (across):"
        lines = [(_code(label), *row) for label, row in zip(result.labels, result.confusion.table(), strict=True)]
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
    where = "with these versions on any number of workers of one kind of device"
    yield f"The same weights come from the same rows and base, {where}, by:"
    yield f"    {_command(config, result)}"


_SAID_OTHERWISE = ("task", "run.workers", "run.device_kind")
"""Of what defines a run: these have flags of their own in its command, the last that of its backend."""


def _command(config: Config, result: Result) -> str:
    files = config.data.files
    weights = ["" if file.weight == 1 else f"={file.weight!r}" for file in files]
    data = [f"{name}{weight}" for name, weight in zip(short_names([file.path for file in files]), weights, strict=True)]
    named = {
        "--task": config.task if config.task != CLASSIFICATION else None,
        "--eval-data": config.data.eval and Path(config.data.eval).name,
        "--text-column": config.data.text_column,
        "--label-column": config.data.label_column,
        "--model": config.model.base if _is_hub_id(config.model.base) else _name(config.model.base),
        "--workers": str(result.world_size),
        "--backend": result.backend,
    }
    words = ["andon", "train", *(word for each in data for word in ("--data", each))]
    words += [word for flag, value in named.items() if value for word in (flag, value)]
    if config.model.revision is not None:
        words += ["--set", f"model.revision={json.dumps(config.model.revision)}"]
    for key in ("text_pair_column", "label_separator"):
        if getattr(config.data, key) is not None:
            words += ["--set", f"data.{key}={json.dumps(getattr(config.data, key))}"]
    named_alone = {"data": {"train": config.data.train}, "model": {"base": config.model.base}}
    default = identity(Config.model_validate(named_alone))
    if config.model.base is not None:  # what is chosen for it may be chosen otherwise elsewhere
        default = {key: value for key, value in default.items() if key not in automatic_keys(config)}
    for key, _, value in differences(default, identity(config)):
        if key not in _SAID_OTHERWISE and not key.endswith((".embedded", ".weights")):
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
    paths = [config.data.eval] if config.data.eval else [file.path for file in config.data.files]
    return ", ".join(Path(path).name for path in paths) or "the rows that Andon embeds"


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


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
