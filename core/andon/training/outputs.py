"""The folder that a run leaves to its next user: the adapter or model, its tokenizer, and a card.

The card is Markdown with a YAML header as model hubs read it (`card.md.j2`), written from the run's own record alone.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from enum import Enum
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from jinja2 import Environment, StrictUndefined
from torch import nn

from andon.config.identity import differences, identity
from andon.config.schema import CLASSIFICATION, MULTI_LABEL, REGRESSION, SFT, TOKEN_CLASSIFICATION, Config
from andon.console.problems import InputError, Problem
from andon.data.chat import asking
from andon.data.origins import short_names
from andon.data.tokens import Tokenizer
from andon.metrics.confusion import Confusion
from andon.model.adapter import export_adapter
from andon.model.build import LOADERS
from andon.model.masks import padding_of
from andon.run.folder import RunFolder
from andon.run.provenance import read_provenance
from andon.run.summary import Summary
from andon.tasks.sft import Asked
from andon.training.choices import automatic_keys
from andon.training.material import HEADS
from andon_contracts.legible import legible_line

_MOST_LABELS, _MOST_COLUMNS = 20, 10
"""Classes that are listed, and up to which the confusion matrix is shown."""
_VERSIONS = ("python", "torch", "transformers", "peft", "numpy")
_HAVE_FLAGS = ("task", "run.workers", "run.device_kind")
"""Keys of a run's identity that the card's command sets by a flag; the last one follows from `--backend`."""


class _Score(NamedTuple):
    """A score in the card: its key in the summary, its name here, its metric name on the hub, and what it is of (a key
    in `_scores`). share: the score is a fraction of that count, so the card shows the number too."""

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


class Form(Enum):
    """What lies in the folder of a card: an adapter alone, an adapter with its base beside it, a model of which every
    weight was trained, or a base with the adapter added to its weights."""

    ADAPTER = "adapter"
    COMPLETE = "complete"
    WHOLE = "whole"
    MERGED = "merged"


def form_of(config: Config) -> Form:
    """What a run's own `adapter` folder holds."""
    if config.adapter.kind == "none":
        return Form.WHOLE
    return Form.COMPLETE if config.model.base is None else Form.ADAPTER


def write_model_files(
    path: Path,
    model: nn.Module,
    config: Config,
    tokenizer: Tokenizer,
    labels: Sequence[str],
    reference: str,
    asked: Asked | None,
) -> None:
    """Write the adapter of `model`, or the whole model if it has none, and its tokenizer into the folder `path`.

    reference: where an adapter's base is. asked: the prompt format of a model that answers.
    """
    named = config.model
    export_adapter(model, path, reference, labels, revision=named.revision, with_base=named.base is None)
    write_tokenizer(path, tokenizer, config, labels, asked, padding_of(model, next(model.parameters()).device).side)


def write_tokenizer(
    path: Path, tokenizer: Tokenizer, config: Config, labels: Sequence[str], asked: Asked | None, side: str
) -> None:
    """Write the files of a tokenizer, and the prompt format of a model that answers. A classifier's tokenizer cuts
    texts as in training, and pads them on `side`. Raises `InputError` if the disk refuses."""
    if asked is not None:
        asked.write(path, tokenizer.pad_id)
    try:
        tokenizer.save(path, config.model.max_length if labels else None, side)
    except Exception as error:
        if type(error) is not Exception:  # the tokenizers library raises a bare Exception for a disk that refuses
            raise
        raise InputError([Problem(str(path.parent), f"the tokenizer cannot be written: {error}")]) from error


def write_card(
    path: Path,
    folder: RunFolder,
    config: Config,
    result: Summary,
    rows: int,
    matrix: Confusion | None,
    form: Form,
    name: str,
    tokenizer: Tokenizer,
    asked: Asked | None,
    notes: Sequence[str] = (),
) -> tuple[str, ...]:
    """Write the card of the run in `folder` into `path`.

    rows: the number of training rows. matrix: the confusion matrix of the scores. name: of the model. notes: sentences
    for one more paragraph; empty ones are left out. Returns lines that a user should read before prompting the model.
    """
    asks = None if asked is None else asking(tokenizer, asked.form)
    provenance = read_provenance(folder.provenance)
    task = config.task or CLASSIFICATION
    base = config.model.base
    # A folder stands in a run's configuration by its whole path, of which only the name goes to others.
    on_hub = base is not None and not base.startswith(("/", "~", "."))
    short = base if base is None or on_hub else Path(base).name
    paths = [config.data.eval] if config.data.eval else [file.path for file in config.data.files]
    evaluated = ", ".join(Path(path).name for path in paths) or "the rows that Andon embeds"
    data = provenance.digest("data")  # of the rows to train on, then of those to evaluate on if they are in other files
    # The hub's word for what such models do, and the pipeline of transformers that does it.
    pipeline = {TOKEN_CLASSIFICATION: task, SFT: "text-generation"}.get(task, "text-classification")

    header: dict[str, Any] = {
        "library_name": "transformers" if form in (Form.WHOLE, Form.MERGED) else "peft",
        "pipeline_tag": pipeline,
        "tags": ["andon", *(["lora"] if form in (Form.ADAPTER, Form.COMPLETE) else [])],
    }
    if on_hub:
        header["base_model"] = base
    scores = [each for each in _SCORES[task] if result.eval.get(each.key) is not None]
    metrics = [{"type": each.hub, "name": each.word, "value": result.eval[each.key]} for each in scores if each.hub]
    if metrics:
        model_index = {
            "task": {"type": pipeline, "name": pipeline.replace("-", " ").title()},
            "dataset": {
                "name": evaluated,
                "type": pipeline,
                "split": result.evaluated_on,
                "args": {"rows": result.eval.get("rows"), "sha256": data[64:] or data},
            },
            "metrics": metrics,
        }
        header["model-index"] = [{"name": name, "results": [model_index]}]

    sources: Mapping[str, Mapping[str, Any]] = result.eval.get("sources") or {}
    sources = sources if len(sources) <= _MOST_LABELS else {}
    by_source = [score for score in _SCORES[task] if any(score.key in one for one in sources.values())]
    by_class = _by_class(result)
    environment = Environment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"plain": _plain, "code": _code, "listed": _listed, "fixed": "{:.4f}".format}
    template = (files("andon.training") / "card.md.j2").read_text(encoding="utf-8")
    shown = environment.from_string(template).render(
        header=yaml.safe_dump(header, sort_keys=False, allow_unicode=True),
        name=name,
        form=form.value,
        task=task,
        config=config,
        labels=list(result.labels),
        paired=config.data.text_pair_column is not None,
        own_base=short,
        note=" ".join(f"{each[0].upper()}{each[1:]}." for each in notes if each),
        loader=LOADERS[HEADS[task]],
        pipeline=pipeline,
        asking=asks,
        result=result,
        rows=rows,
        evaluated=evaluated,
        scores=_scores(task, scores, result),
        classes=by_class if len(by_class) <= _MOST_LABELS else (),
        sources=sources,
        by_source=sorted(by_source, key=lambda score: score.key != "loss"),
        confusion=matrix.table() if matrix is not None and matrix.classes <= _MOST_COLUMNS else (),
        data=data,
        provenance=provenance,
        versions=[(each, provenance.fingerprint[each]) for each in _VERSIONS if each in provenance.fingerprint],
        command=_command(config, result, short),
    )
    (path / "README.md").write_text(f"{shown}\n", encoding="utf-8")  # where hubs look for the card of a model
    return () if asks is None or not asks.note else (asks.note,)


def _by_class(result: Summary) -> list[tuple[str, Mapping[str, Any]]]:
    types: Mapping[str, Mapping[str, Any]] = result.eval.get("types") or {}
    return [*zip(result.labels, result.eval.get("classes") or (), strict=False), *types.items()]


def _scores(task: str, scores: Sequence[_Score], result: Summary) -> list[tuple[str, str, str]]:
    rows, tokens, words = (int(result.eval.get(key) or 0) for key in ("rows", "tokens", "words"))
    each = len(result.labels)
    support = sum(one["support"] for _, one in _by_class(result))
    counts = {
        "rows": (rows, f"{rows} rows"),
        "each": (each, f"mean of {each} {'labels' if task == MULTI_LABEL else 'classes'}"),
        "true": (support, f"{support} labels of {rows} rows"),
        "pairs": (rows * each, f"{rows} rows times {each} labels"),
        "spans": (support, f"{support} spans"),
        "words": (words, f"{words} words"),
        "tokens": (tokens, f"{tokens} trained tokens"),
    }
    table = []
    for score in scores:
        value, (count, of) = result.eval[score.key], counts[score.of]
        table.append((score.word, f"{value:.4f}", f"{round(value * count)} of {of}" if score.share else of))
    return table


def _command(config: Config, result: Summary, base: str | None) -> str:
    """The command that repeats the run, for a shell, with files and folders by their names alone."""
    weights = ["" if file.weight == 1 else f"={file.weight!r}" for file in config.data.files]
    names = short_names([file.path for file in config.data.files])
    named = {
        "--task": config.task if config.task != CLASSIFICATION else None,
        "--eval-data": config.data.eval and Path(config.data.eval).name,
        "--text-column": config.data.text_column,
        "--label-column": config.data.label_column,
        "--model": base,
        "--workers": str(result.world_size),
        "--backend": result.backend,
    }
    words = ["andon", "train"]
    for name, weight in zip(names, weights, strict=True):
        words += ["--data", f"{name}{weight}"]
    words += [word for flag, value in named.items() if value for word in (flag, value)]
    settings = {
        "model.revision": config.model.revision,
        "data.text_pair_column": config.data.text_pair_column,
        "data.label_separator": config.data.label_separator,
    }
    for key, text in settings.items():
        words += [] if text is None else ["--set", f"{key}={json.dumps(text)}"]
    named_alone = {"data": {"train": config.data.train}, "model": {"base": config.model.base}}
    default = identity(Config.model_validate(named_alone))
    if config.model.base is not None:  # automatic values may be chosen otherwise elsewhere
        default = {key: value for key, value in default.items() if key not in automatic_keys(config)}
    for key, _, value in differences(default, identity(config)):
        if key not in _HAVE_FLAGS and not key.endswith((".embedded", ".weights")):
            words += ["--set", f"{key}={json.dumps(value)}"]
    return " ".join(shlex.quote(legible_line(word)) for word in words)


def _listed(labels: Sequence[str]) -> str:
    more = f" and {len(labels) - _MOST_LABELS} more" if len(labels) > _MOST_LABELS else ""
    return ", ".join(map(_code, labels[:_MOST_LABELS])) + more


def _plain(text: str) -> str:
    """Text of others as Markdown that means nothing but its letters, on one line."""
    return "".join(f"\\{letter}" if letter in "\\`*_[]<>#|" else letter for letter in legible_line(text))


def _code(text: str) -> str:
    """`text` as it is written, between backticks; a backtick in it becomes an apostrophe."""
    return f"`{legible_line(text).replace('`', chr(39)).replace('|', chr(92) + '|')}`"
