"""A finished run's model, for evaluation and prediction."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from andon.backend.inprocess import InlineBackend
from andon.config.schema import CLASSIFICATION, MULTI_LABEL, REGRESSION, TOKEN_CLASSIFICATION, Config
from andon.config.source import loading
from andon.console.messages import say
from andon.console.problems import InputError, Problem
from andon.data.chat import encode_prompt
from andon.data.conversations import Message, written
from andon.data.rows import DataSet, Examples
from andon.data.tokens import HuggingFaceTokenizer, Tokenizer, pretrained_tokenizer
from andon.metrics.scores import ClassificationScores, Scores
from andon.model.adapter import attach, base_digest, load_adapter, read_labels
from andon.model.batches import predictions
from andon.model.build import ModelSpec, build_base
from andon.model.causal import generate_greedy
from andon.model.finite import require_finite_model
from andon.run.folder import RunFolder
from andon.run.provenance import read_provenance
from andon.tasks.encoded import EncodedRows
from andon.tasks.sft import Asked
from andon.training.evaluation import evaluate
from andon.training.existing import config_at_hand, config_of
from andon.training.material import (
    HEADS,
    UNWEIGHTED,
    adapter_spec,
    cut_note,
    encoded,
    loss_weights,
    model_spec,
    skipped_of,
    task_of,
    usable_ids,
    warnings_of,
)
from andon.training.rows import READERS, Rows, read_rows, selection_of, skip_notes
from andon_contracts.digest import hex64


@dataclass(frozen=True)
class TrainedRun:
    """What a run left: its model with the trained weights, in eval mode on the CPU, its tokenizer and labels."""

    folder: RunFolder
    config: Config
    model: nn.Module
    tokenizer: Tokenizer
    labels: tuple[str, ...]


@dataclass(frozen=True)
class Prediction:
    """The likeliest label of a text, with its probability; `probabilities` are those of all labels, in their order."""

    text: str
    label: str
    probability: float
    probabilities: tuple[float, ...]

    def record(self, labels: Sequence[str] | None, rounded: Callable[[float], float]) -> dict[str, Any]:
        """For a file or a screen. labels: names of the probabilities, where all are to be told."""
        row: dict[str, Any] = {"text": self.text, "label": self.label, "probability": rounded(self.probability)}
        if labels is not None:
            row["scores"] = dict(zip(labels, map(rounded, self.probabilities), strict=True))
        return row


@dataclass(frozen=True)
class PredictedNumber:
    """The number that a model gives a text."""

    text: str
    value: float

    def record(self, labels: Sequence[str] | None, rounded: Callable[[float], float]) -> dict[str, Any]:
        """For a file or a screen."""
        return {"text": self.text, "value": rounded(self.value)}


@dataclass(frozen=True)
class PredictedLabels:
    """The labels of a text whose probability is above 0.5; `probabilities` are those of all labels, by name."""

    text: str
    labels: tuple[str, ...]
    probabilities: Mapping[str, float]

    def record(self, labels: Sequence[str] | None, rounded: Callable[[float], float]) -> dict[str, Any]:
        """For a file or a screen. labels: names of the probabilities, where all are to be told."""
        told = self.labels if labels is None else labels
        scores = {name: rounded(self.probabilities[name]) for name in told}
        return {"text": self.text, "labels": list(self.labels), "scores": scores}


@dataclass(frozen=True)
class PredictedTags:
    """The likeliest tag of each word of a text; None of a word that was cut off."""

    text: str
    tags: tuple[str | None, ...]

    def record(self, labels: Sequence[str] | None, rounded: Callable[[float], float]) -> dict[str, Any]:
        """For a file or a screen."""
        return {"tokens": self.text.split(), "tags": list(self.tags)}


Predicted = Prediction | PredictedNumber | PredictedLabels | PredictedTags


def load_run(folder: RunFolder, base: str | None = None) -> TrainedRun:
    """Build the run's base again, check that it is the same one, and load what was trained.

    base: where it is now; None: where it was, or what the project embeds. Raises `InputError` for a base whose weights
    are not those that the adapter was trained on, and for a `base` of a run that needs none.
    """
    torch.set_num_threads(1)
    config = _config_of_model(folder, base)
    head = HEADS[config.task or CLASSIFICATION]
    labels = () if head == "causal" else read_labels(folder.adapter)
    tokenizer = pretrained_tokenizer(str(folder.adapter), local_only=True)
    adapter = adapter_spec(config, tokenizer)
    spec = model_spec(config, labels, tokenizer, head)
    if adapter.kind == "none":
        model = _whole_model(folder, spec)
    else:
        model = attach(build_base(spec), adapter, config.seed)
        _require_same_base(folder, model)
        load_adapter(model, folder.adapter)
    for warning in warnings_of(model, tokenizer):
        say(warning)
    return TrainedRun(folder, config, model.eval(), tokenizer, labels)


def _config_of_model(folder: RunFolder, base: str | None) -> Config:
    """The run's configuration, its base one that is on this machine wherever the run's model is made of it."""
    config = config_of(folder)
    whole = config.adapter.kind == "none"
    if base is not None and (whole or config.model.base is None):
        why = "its whole model lies in its folder" if whole else "it was trained on the embedded model"
        raise InputError([Problem("--model", f"the run in {folder.path} takes no base: {why}")])
    return config if whole else config_at_hand(folder, (), {} if base is None else {"model.base": base})


def _whole_model(folder: RunFolder, spec: ModelSpec) -> nn.Module:
    from transformers import AutoModelForSequenceClassification

    if spec.head in ("causal", "tokens"):
        return build_base(replace(spec, base=str(folder.adapter), dtype="float32"))
    with loading(str(folder.adapter), str(folder.path)):
        model: nn.Module = AutoModelForSequenceClassification.from_pretrained(
            str(folder.adapter),
            num_labels=spec.num_labels,
            local_files_only=True,
            trust_remote_code=False,
            dtype=torch.float32,
        )
    require_finite_model(model, folder.adapter, str(folder.adapter))
    return model


def _require_same_base(folder: RunFolder, model: nn.Module) -> None:
    wanted = read_provenance(folder.provenance).digest("base")
    found = hex64(base_digest(model))
    if found != wanted:
        raise InputError(
            [Problem(str(folder.path), f"the base model has digest {found}, the adapter was trained on {wanted}")]
        )


def read_labelled(
    folder: RunFolder, data: Path, *, text_column: str | None = None, label_column: str | None = None
) -> Examples:
    """The rows in the file `data`, whose labels must be among the run's. Raises `InputError` with all that is wrong.

    text_column, label_column: where they stand in this file; None: where the run's configuration says.
    """
    config = config_of(folder)
    columns = config.data
    if text_column or label_column:
        named = {"text_column": text_column, "label_column": label_column}
        columns = columns.model_copy(update={key: name for key, name in named.items() if name is not None})
    task = config.task or CLASSIFICATION
    labels = () if HEADS[task] == "causal" else read_labels(folder.adapter)
    found = READERS[task].read(columns, [data], labels, selection_of(config.data, train=False))
    for note in skip_notes(found.origins.skipped if found.origins is not None else ()):
        say(note)
    return found


def evaluate_run(run: TrainedRun, data: Examples) -> Scores:
    """Scores of the rows in `data` (`read_labelled`), as the run's own summary has them.

    The loss is weighted as in training. Weights by frequency are those of the training rows: where these are gone or
    have changed, there is no loss, and a line says so.
    """
    backend = InlineBackend([torch.device("cpu")])
    if not isinstance(data, DataSet):
        rows = UNWEIGHTED[run.config.task or CLASSIFICATION](run.config, data, run.tokenizer)
        for note in skip_notes([*skipped_of(rows).values()]):
            say(note)
        ids = usable_ids(rows, data.ids)
        if note := cut_note(rows, ids, run.config):
            say(note)
        return evaluate(backend, [run.model], rows, ids)
    weights = _weights(run)
    task = task_of(run.config, data, run.tokenizer, weights or (1.0,) * len(run.labels))
    if note := cut_note(task, data.ids, run.config):
        say(note)
    scores = evaluate(backend, [run.model], task, data.ids)
    if weights is None:
        kind = run.config.data.class_weights
        say(f"note: no loss: its weights ({kind}) come from the training rows, which are gone or have changed")
        assert isinstance(scores, ClassificationScores)
        return replace(scores, loss=None)
    return scores


def named(found: Scores, labels: Sequence[str]) -> dict[str, Any]:
    """`found` as plain values for JSON, with the classes' names, where there are any.

    Each of `classes` has its `label`; `labels` names the classes that the cells of `confusion` number from 0. A score
    that says nothing of these rows, as AUROC of more than two classes, is left out.
    """
    values = {name: value for name, value in found.as_dict().items() if value is not None}
    if "classes" not in values:
        return values
    values["classes"] = [{"label": label} | one for label, one in zip(labels, values["classes"], strict=True)]
    confusion = {"confusion": values.pop("confusion")} if "confusion" in values else {}
    return values | {"labels": list(labels)} | confusion


def rows_of(run: TrainedRun) -> Rows | None:
    """The rows that the run was trained and scored on; None where they are gone or have changed."""
    try:
        rows = read_rows(run.config)
    except InputError:
        return None
    same = rows.digest == read_provenance(run.folder.provenance).digest("data")
    return rows.numbered_by(run.labels) if same else None


def _weights(run: TrainedRun) -> tuple[float, ...] | None:
    if run.config.data.class_weights == "uniform":
        return (1.0,) * len(run.labels)
    rows = rows_of(run)
    return None if rows is None else loss_weights(run.config, rows)


@dataclass(frozen=True)
class Answer:
    """What a run's model writes to a prompt; `finished`: whether it came to the end of its answer.

    A prompt of several messages is told as a text, each with its role before it.
    """

    prompt: str
    answer: str
    tokens: int
    finished: bool


def answer(run: TrainedRun, prompts: Iterable[str | Sequence[Message]], max_new_tokens: int) -> Iterator[Answer]:
    """The model's answer to each prompt, in order: at each place the likeliest token, so the same every time.

    A prompt is messages, or a text that is one message of a user, written as the conversations were that the run was
    trained on. Raises `InputError` for a prompt that leaves the model no room.
    """
    assert isinstance(run.tokenizer, HuggingFaceTokenizer)
    base = run.tokenizer.base
    asked, limit = Asked.read(run.folder.adapter), run.config.model.max_length
    for prompt in prompts:
        messages = (Message("user", prompt),) if isinstance(prompt, str) else tuple(prompt)
        ids = encode_prompt(run.tokenizer, asked.form, messages)
        if len(ids) >= limit:
            what = f"has {len(ids)} tokens, and the model was trained on {limit} (model.max_length); shorten it"
            raise InputError([Problem("the prompt", what)])
        found = generate_greedy(run.model, ids, asked.stops, min(max_new_tokens, limit - len(ids)))
        finished = bool(found) and found[-1] in asked.stops
        text = str(base.decode(found[:-1] if finished else found))
        alone = len(messages) == 1 and messages[0].role == "user"
        yield Answer(messages[0].content if alone else written(messages), text, len(found), finished)


def predict(
    run: TrainedRun, texts: Iterable[str], batch_size: int = 64, *, pairs: Iterable[str] | None = None
) -> Iterator[Predicted]:
    """The prediction of each text, in order, as soon as its batch is full. pairs: the second text of each.

    Raises `InputError` for texts alone where the run has learned from pairs, and the other way round.
    """
    named = run.config.data.text_pair_column
    if (named is None) != (pairs is None):
        what = f"has learned from {'single texts' if named is None else f'pairs, with a second text in {named!r}'}"
        raise InputError([Problem(str(run.folder.path), what)])
    waiting, others = iter(texts), iter(pairs or ())
    of_task = _PREDICTED[run.config.task or CLASSIFICATION]
    while batch := list(islice(waiting, batch_size)):
        second = None if pairs is None else list(islice(others, len(batch)))
        yield from of_task(run, batch, logits_of_texts(run, batch, second))


def logits_of_texts(run: TrainedRun, texts: Sequence[str], pairs: Sequence[str] | None) -> torch.Tensor:
    """The logits of one batch, fp32 [rows, outputs], or [rows, length, tags] of a run that tags words."""
    limit = run.config.model.max_length
    tokens, columns = encoded(run.tokenizer, texts, pairs, limit)
    asked = EncodedRows(tokens, None, pad_id=run.tokenizer.pad_id, max_length=limit, columns=columns)
    return predictions(run.model, asked.load(range(len(texts)), torch.device("cpu")))


def _classes(run: TrainedRun, texts: Sequence[str], logits: torch.Tensor) -> Iterator[Prediction]:
    for text, found in zip(texts, logits.softmax(dim=1).tolist(), strict=True):
        best = max(range(len(found)), key=found.__getitem__)
        yield Prediction(text, run.labels[best], found[best], tuple(found))


def _numbers(run: TrainedRun, texts: Sequence[str], logits: torch.Tensor) -> Iterator[PredictedNumber]:
    yield from map(PredictedNumber, texts, logits[:, 0].tolist())


def _label_sets(run: TrainedRun, texts: Sequence[str], logits: torch.Tensor) -> Iterator[PredictedLabels]:
    for text, row, found in zip(texts, (logits > 0).tolist(), logits.sigmoid().tolist(), strict=True):
        labels = tuple(name for name, there in zip(run.labels, row, strict=True) if there)
        yield PredictedLabels(text, labels, dict(zip(run.labels, found, strict=True)))


def _tags(run: TrainedRun, texts: Sequence[str], logits: torch.Tensor) -> Iterator[PredictedTags]:
    _, firsts = run.tokenizer.encode_words(texts, run.config.model.max_length)
    for text, places, best in zip(texts, firsts, logits.argmax(dim=2).tolist(), strict=True):
        yield PredictedTags(text, tuple(run.labels[best[place]] if place >= 0 else None for place in places))


_PREDICTED: Mapping[str, Callable[[TrainedRun, Sequence[str], torch.Tensor], Iterator[Predicted]]] = {
    CLASSIFICATION: _classes,
    REGRESSION: _numbers,
    MULTI_LABEL: _label_sets,
    TOKEN_CLASSIFICATION: _tags,
}
"""By the task's name: texts and the model's logits of them to what is said of each."""
