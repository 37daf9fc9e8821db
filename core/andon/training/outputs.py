"""The output folder of a run: the adapter or model, its tokenizer, and a model card.

The card (`card.md.j2`) is Markdown with the YAML header of model hubs. All its values come from the run folder.
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

from andon.config.load import differences, identity
from andon.config.schema import CAUSAL, CLASSIFICATION, DPO, MULTI_LABEL, REGRESSION, SFT, TOKEN_CLASSIFICATION, Config
from andon.console.messages import InputError
from andon.data.chat import prompt_format
from andon.data.origins import short_names
from andon.data.tokens import Tokenizer
from andon.metrics.scores import Confusion
from andon.model.adapter import export_adapter
from andon.model.build import LOADERS
from andon.model.masks import padding_of
from andon.run.folder import RunFolder
from andon.run.summary import Summary, read_provenance
from andon.tasks.sft import GenerationSettings
from andon.training.choices import automatic_keys
from andon.training.material import HEADS
from andon_contracts.legible import legible_line

_MOST_LABELS, _MOST_COLUMNS = 20, 10
"""The most classes to list, and the most columns of a confusion matrix to show."""
_VERSIONS = ("python", "torch", "transformers", "peft", "numpy", "source bitsandbytes")
_HAVE_FLAGS = ("task", "run.workers", "run.device_kind")
"""Identity keys that the card's command sets by flags; `run.device_kind` follows from `--backend`."""


class _Score(NamedTuple):
    """A score in the card. key: in the summary. word: its name in the card. hub: its metric on the hub. of: the counted
    unit, a key of `counts` in `_scores`. share: the score is a fraction of that count, so the card shows the number."""

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
    DPO: (
        _Score("reward_accuracy", "reward accuracy", of="rows", share=True),
        _Score("margin", "reward margin"),
        _Score("loss", "loss"),
    ),
}


class Form(Enum):
    """Contents of an output folder: an adapter, an adapter with the weights of its base, a model trained in full, or a
    base with the adapter merged."""

    ADAPTER = "adapter"
    COMPLETE = "complete"
    WHOLE = "whole"
    MERGED = "merged"


def form_of(config: Config) -> Form:
    if config.adapter.kind == "none":
        return Form.WHOLE
    return Form.COMPLETE if config.model.base is None else Form.ADAPTER


def packing_note(config: Config, form: Form) -> str:
    """For a card: how to load the base of an adapter that was trained on a quantized base. Empty for other models."""
    if config.model.quantize == "none" or form is not Form.ADAPTER:
        return ""
    return (
        "it was trained on its base in nf4 with double quantization: for the same outputs load the base with "
        'quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", '
        f"bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.{config.model.dtype})"
    )


def write_model_files(
    path: Path,
    model: nn.Module,
    config: Config,
    tokenizer: Tokenizer,
    labels: Sequence[str],
    reference: str,
    asked: GenerationSettings | None,
) -> None:
    """Write the adapter of `model`, or the whole model if it has none, and its tokenizer into the folder `path`.

    reference: the path or hub id of an adapter's base. asked: the prompt format of an `sft` model, else None.
    """
    named = config.model
    export_adapter(model, path, reference, labels, revision=named.revision, with_base=named.base is None)
    write_tokenizer(path, tokenizer, config, labels, asked, padding_of(model, next(model.parameters()).device).side)


def write_tokenizer(
    path: Path, tokenizer: Tokenizer, config: Config, labels: Sequence[str], asked: GenerationSettings | None, side: str
) -> None:
    """Write the files of a tokenizer, and the prompt format of an `sft` model (`asked`). A classifier's tokenizer
    truncates texts as in training, and pads them on `side`. Raises `InputError` if a file cannot be written."""
    if asked is not None:
        asked.write(path, tokenizer.pad_id)
    try:
        tokenizer.save(path, config.model.max_length if labels else None, side)
    except Exception as error:
        if type(error) is not Exception:  # the tokenizers library raises a bare Exception if writing fails
            raise
        raise InputError.at(path.parent, f"the tokenizer cannot be written: {error}") from error


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
    asked: GenerationSettings | None,
    notes: Sequence[str] = (),
) -> tuple[str, ...]:
    """Write the card of the run in `folder` into `path`.

    rows: the number of training rows. matrix: the confusion matrix of the scores. name: the model's. notes: sentences
    for an extra paragraph; empty ones are skipped. Returns warnings about prompting the model.
    """
    prompt = None if asked is None else prompt_format(tokenizer, asked.form)
    provenance = read_provenance(folder.provenance)
    machine = provenance.fingerprint
    task = config.task or CLASSIFICATION
    base = config.model.base
    # A run's configuration has a local base's absolute path; the card shows only the folder's name.
    on_hub = base is not None and not base.startswith(("/", "~", "."))
    base_name = base if base is None or on_hub else Path(base).name
    own = config.data.eval or config.data.validation
    paths = [own] if own else [file.path for file in config.data.files]
    evaluated = ", ".join(Path(path).name for path in paths) or "the rows that Andon embeds"
    data = provenance.digest("data")  # training rows, then rows of a separate evaluation file
    # The task's name on the hub, which is also the name of its transformers pipeline.
    pipeline = {TOKEN_CLASSIFICATION: task, **dict.fromkeys(CAUSAL, "text-generation")}.get(task, "text-classification")

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
    card = environment.from_string(template).render(
        header=yaml.safe_dump(header, sort_keys=False, allow_unicode=True),
        name=name,
        form=form.value,
        task=task,
        config=config,
        labels=list(result.labels),
        paired=config.data.text_pair_column is not None,
        own_base=base_name,
        note=" ".join(f"{each[0].upper()}{each[1:]}." for each in notes if each),
        loader=LOADERS[HEADS[task]],
        pipeline=pipeline,
        asking=prompt,
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
        versions=[(each.removeprefix("source "), machine[each]) for each in _VERSIONS if each in machine],
        command=_command(config, result, base_name),
    )
    (path / "README.md").write_text(f"{card}\n", encoding="utf-8")  # the file in which hubs expect a card
    return () if prompt is None or not prompt.note else (prompt.note,)


def _by_class(result: Summary) -> list[tuple[str, Mapping[str, Any]]]:
    types: Mapping[str, Mapping[str, Any]] = result.eval.get("types") or {}
    return [*zip(result.labels, result.eval.get("classes") or (), strict=False), *types.items()]


def _scores(task: str, scores: Sequence[_Score], result: Summary) -> list[tuple[str, str, str]]:
    rows, tokens, words = (int(result.eval.get(key) or 0) for key in ("rows", "tokens", "words"))
    each = len(result.labels)
    support = sum(one["support"] for _, one in _by_class(result))
    counts = {
        "rows": (rows, f"{rows} rows"),
        "each": (each, f"mean of {each} labels" if task == MULTI_LABEL else "mean of classes with rows or predictions"),
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
    weights = ["" if file.weight == 1 else f"={file.weight!r}" for file in config.data.files]
    names = short_names([file.path for file in config.data.files])
    named = {
        "--task": config.task if config.task != CLASSIFICATION else None,
        "--validation-data": config.data.validation and Path(config.data.validation).name,
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
        "adapter.init": config.adapter.init and Path(config.adapter.init).name,
        "data.text_pair_column": config.data.text_pair_column,
        "data.label_separator": config.data.label_separator,
    }
    for key, text in settings.items():
        words += [] if text is None else ["--set", f"{key}={json.dumps(text)}"]
    data_and_base = {"data": {"train": config.data.train}, "model": {"base": config.model.base}}
    default = identity(Config.model_validate(data_and_base))
    if config.model.base is not None:  # automatic values may differ on other machines, so all are set
        default = {key: value for key, value in default.items() if key not in automatic_keys(config)}
    for key, _, value in differences(default, identity(config)):
        if key not in _HAVE_FLAGS and not key.endswith((".embedded", ".weights", ".new")):
            words += ["--set", f"{key}={json.dumps(value)}"]
    return " ".join(shlex.quote(legible_line(word)) for word in words)


def _listed(labels: Sequence[str]) -> str:
    more = f" and {len(labels) - _MOST_LABELS} more" if len(labels) > _MOST_LABELS else ""
    return ", ".join(map(_code, labels[:_MOST_LABELS])) + more


def _plain(text: str) -> str:
    return "".join(f"\\{letter}" if letter in "\\`*_[]<>#|" else letter for letter in legible_line(text))


def _code(text: str) -> str:
    return f"`{legible_line(text).replace('`', chr(39)).replace('|', chr(92) + '|')}`"
