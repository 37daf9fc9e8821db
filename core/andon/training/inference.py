"""Loads a finished run's model, to evaluate, predict and answer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from andon.backend.base import InlineBackend
from andon.backend.devices import named_devices
from andon.config.schema import CLASSIFICATION, DPO, MULTI_LABEL, REGRESSION, TOKEN_CLASSIFICATION, Config
from andon.console.messages import InputError, Problem, ProblemList, say
from andon.data.chat import encode_prompt
from andon.data.conversations import Message
from andon.data.rows import Examples
from andon.data.tokens import Tokenizer, pretrained_tokenizer
from andon.metrics.scores import ClassificationScores, Scores
from andon.model.adapter import load_adapter, read_labels, trainable_parameters
from andon.model.build import build_base, half_of, positions_of, without_adapter
from andon.model.causal import generate
from andon.model.masks import EvaluationBatching, predictions
from andon.model.quantize import NONE, quantize
from andon.run.checkpoint import Checkpoint, CheckpointError, load_checkpoint, saved_steps
from andon.run.folder import RunFolder
from andon.run.summary import labelled, read_provenance, read_summary
from andon.step.replica import WEIGHTS, Replica, base_digest
from andon.tasks.dpo import DpoTask
from andon.tasks.sft import GenerationSettings
from andon.tasks.text import EncodedRows
from andon.training.build import build_model
from andon.training.choices import with_values
from andon.training.existing import config_at_hand, config_of
from andon.training.material import (
    HEADS,
    cut_note,
    interface_of,
    loss_weights,
    skipped_of,
    task_of,
    tokenizer_of,
    usable_ids,
    warnings_of,
)
from andon.training.reference import score_references
from andon.training.rows import Rows, read_files, read_rows, selection_of, skip_notes
from andon.training.trainer import evaluate
from andon_contracts.digest import hex64

_WINDOW, _PROMPTS = 2048, 256
"""Texts, and prompts, in memory at a time; they are sorted by length together."""
_TOKENS = 1 << 14
"""Tokens of one forward pass over texts, padding included."""


@dataclass(frozen=True)
class TrainedRun:
    """A run's model with the trained weights, in eval mode on `device`, its tokenizer and labels.

    step: of the checkpoint with these weights; None: the run's result.
    """

    folder: RunFolder
    config: Config
    model: nn.Module
    tokenizer: Tokenizer
    labels: tuple[str, ...]
    device: torch.device
    step: int | None = None


@dataclass(frozen=True)
class Prediction:
    """The likeliest label of a text, with its probability; `probabilities`: of all labels, in order."""

    text: str
    label: str
    probability: float
    probabilities: tuple[float, ...]

    def record(self, labels: Sequence[str] | None, rounded: Callable[[float], float]) -> dict[str, Any]:
        """Values for a file or a screen. labels: the names of all probabilities, if all are to be shown."""
        row: dict[str, Any] = {"text": self.text, "label": self.label, "probability": rounded(self.probability)}
        if labels is not None:
            row["scores"] = dict(zip(labels, map(rounded, self.probabilities), strict=True))
        return row


@dataclass(frozen=True)
class PredictedNumber:
    text: str
    value: float

    def record(self, labels: Sequence[str] | None, rounded: Callable[[float], float]) -> dict[str, Any]:
        return {"text": self.text, "value": rounded(self.value)}


@dataclass(frozen=True)
class PredictedLabels:
    """The labels of a text with a probability above 0.5; `probabilities`: of all labels, by name, always shown."""

    text: str
    labels: tuple[str, ...]
    probabilities: Mapping[str, float]

    def record(self, labels: Sequence[str] | None, rounded: Callable[[float], float]) -> dict[str, Any]:
        scores = {name: rounded(value) for name, value in self.probabilities.items()}
        return {"text": self.text, "labels": list(self.labels), "scores": scores}


@dataclass(frozen=True)
class PredictedTags:
    """The likeliest tag of each word of a text; None for a word that was cut off."""

    text: str
    tags: tuple[str | None, ...]

    def record(self, labels: Sequence[str] | None, rounded: Callable[[float], float]) -> dict[str, Any]:
        return {"tokens": self.text.split(), "tags": list(self.tags)}


Predicted = Prediction | PredictedNumber | PredictedLabels | PredictedTags


def device_named(name: str) -> torch.device:
    """Parse `auto` (the first GPU if torch can use one, else the CPU), `cpu`, `cuda` or `cuda:N`.

    Raises `InputError` for any other name, and for a missing GPU.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return torch.device("cuda:0" if gpus else "cpu")
    try:
        return named_devices([name], gpus)[0]
    except InputError as error:
        raise InputError([Problem("--device", f"{each.what}; or use auto") for each in error.problems]) from None


def load_run(
    folder: RunFolder,
    base: str | None = None,
    *,
    checkpoint: str | None = None,
    device: str = "cpu",
    as_loaded: bool = False,
) -> TrainedRun:
    """Rebuild the run's base, check its digest, load the trained weights, and move the model to `device`.

    base: current path of the base; None: as configured. checkpoint: `best`, `last` or a step; None: the run's result,
    from its adapter folder; only a finished run has this. device: see `device_named`. as_loaded: do not quantize the
    base of a run that did. Raises `InputError` if the base is not the one that was trained on, if the run needs no
    `base`, and for a missing or damaged checkpoint.
    """
    place, finished = device_named(device), folder.adapter.is_dir()
    saved = None if checkpoint is None else _named_checkpoint(folder, checkpoint)
    config = config_of(folder)
    whole = config.adapter.kind == "none" and finished
    if base is not None and (whole or config.model.base is None):
        why = "its folder has the whole model" if whole else "it was trained on the embedded model"
        raise InputError.at("--model", f"the run in {folder.path} needs no base: {why}")
    if not whole:
        config = config_at_hand(folder, (), {} if base is None else {"model.base": base})
    head = HEADS[config.task or CLASSIFICATION]
    labels = _labels_of(folder, config, saved)
    if finished:
        tokenizer = pretrained_tokenizer(str(folder.adapter), local_only=True)
    else:
        tokenizer = tokenizer_of(config, config.task or CLASSIFICATION)
    interface = interface_of(config, head, labels, tokenizer)
    if whole:
        own = {"base": str(folder.adapter), "revision": None, "dtype": "float32"}
        model = build_base(config.model.model_copy(update=own), interface, config.seed)
    else:
        # Its weights are loaded below, so an adapter that the run went on from may be gone.
        model = build_model(with_values(config, {"adapter.init": None}), interface)
        recorded, digest = read_provenance(folder.provenance).digest("base"), hex64(base_digest(model))
        if digest != recorded:
            what = f"the base model has digest {digest}, the adapter was trained on {recorded}"
            raise InputError.at(folder.path, what)
        if finished:
            load_adapter(model, folder.adapter)
    if saved is not None:
        prefix, trained = f"{WEIGHTS}/", trainable_parameters(model)
        values = {name.removeprefix(prefix): each for name, each in saved.tensors.items() if name.startswith(prefix)}
        if {name: each.shape for name, each in values.items()} != {name: each.shape for name, each in trained.items()}:
            raise InputError.at("--checkpoint", f"{saved.path} has other weights than this run trains")
        with torch.no_grad():
            for name, value in values.items():
                trained[name].copy_(value)
    if config.model.quantize != NONE and not as_loaded:
        quantize(model, place)
    model = model.to(place).eval()
    for warning in warnings_of(model, tokenizer):
        say(warning)
    return TrainedRun(folder, config, model, tokenizer, labels, place, None if saved is None else saved.step)


def _named_checkpoint(folder: RunFolder, name: str) -> Checkpoint:
    steps = saved_steps(folder.checkpoints)
    available = f"there are {', '.join(map(str, steps))}" if steps else "there are none"
    if name == "last":
        step = max(steps, default=0)
    elif name == "best":
        best = read_summary(folder.summary).best_step if folder.summary.exists() else None
        if best is None:
            what = "no best checkpoint is known: the run has not ended, or no validation took place"
            raise InputError.at("--checkpoint", f"{what}; use last, or a step: {available}")
        step = best
    elif name.isascii() and name.isdecimal():
        step = int(name)
    else:
        raise InputError.at("--checkpoint", f"{name!r} is not best, last or a step; {available}")
    if step not in steps:
        raise InputError(f"--checkpoint: {folder.checkpoints} has no checkpoint of step {step}; {available}")
    try:
        return load_checkpoint(folder.checkpoints / f"step-{step:08d}")
    except CheckpointError as error:
        raise InputError.at("--checkpoint", str(error)) from error


def _labels_of(folder: RunFolder, config: Config, saved: Checkpoint | None) -> tuple[str, ...]:
    if saved is None or folder.adapter.is_dir():
        return () if HEADS[config.task or CLASSIFICATION] == "causal" else read_labels(folder.adapter)
    identity: Any = saved.state.get("identity")
    if not isinstance(identity, dict) or not isinstance(identity.get("labels"), list):
        raise InputError.at(saved.path, "its state does not name the classes; use another checkpoint")
    return tuple(map(str, identity["labels"]))


def read_labelled(
    folder: RunFolder,
    data: Path,
    *,
    checkpoint: str | None = None,
    text_column: str | None = None,
    label_column: str | None = None,
    bad_rows: str = "refuse",
) -> Examples:
    """Read the rows in `data`, whose labels must be among the run's. Raises `InputError` with every problem.

    checkpoint: as in `load_run`. text_column, label_column: of this file; None: as configured for the run. bad_rows:
    refuse or skip.
    """
    config = config_of(folder)
    named = {"text_column": text_column, "label_column": label_column}
    columns = config.data.model_copy(update={key: name for key, name in named.items() if name is not None})
    saved = None if checkpoint is None or folder.adapter.is_dir() else _named_checkpoint(folder, checkpoint)
    labels = _labels_of(folder, config, saved)
    selection = selection_of(config.data, train=False, bad_rows=bad_rows)
    rows = read_files(config.task or CLASSIFICATION, columns, [data], labels, selection)
    say(*skip_notes(rows.origins.skipped if rows.origins is not None else (), 20, option="--bad-rows skip"))
    return rows


def evaluate_run(run: TrainedRun, data: Examples) -> Scores:
    """Score the rows in `data` (`read_labelled`), as for the run's own summary.

    The loss has the weights of training. Weights by frequency need the training rows: without them the loss is omitted,
    with a note.
    """
    kind, weights = run.config.data.class_weights, (1.0,) * len(run.labels)
    if kind != "uniform":
        rows = rows_of(run)
        weights = () if rows is None else loss_weights(run.config, rows)
    skips = data.origins is not None and data.origins.problems.skips
    config = with_values(run.config, {"data.bad_rows": "skip" if skips else "refuse"})
    task = task_of(config, data, run.tokenizer, weights or (1.0,) * len(run.labels))
    ids = usable_ids(task, data.ids)
    notes = skip_notes([*skipped_of(task).values()], 20, option="--bad-rows skip")
    say(*notes, *filter(None, [cut_note(task, ids, run.config)]))
    backend = InlineBackend([run.device])
    if isinstance(task, DpoTask):
        score_references(backend, [_initial_model(run)], task, ids, EvaluationBatching())
    scores = evaluate(backend, [run.model], task, ids)
    if len(weights) < len(run.labels):
        say(f"note: no loss: its class weights ({kind}) need the training rows, which are missing or have changed")
        assert isinstance(scores, ClassificationScores)
        return replace(scores, loss=None)
    return scores


def _initial_model(run: TrainedRun) -> nn.Module:
    config = run.config
    model = build_model(config, interface_of(config, HEADS[DPO], (), run.tokenizer))
    if config.adapter.init is not None or config.adapter.kind == "none":  # else the base suffices, which is checked
        recorded = read_provenance(run.folder.provenance).digest("initial_weights")
        replica = Replica(model, trainable_parameters(model), config.optimizer, config.seed, torch.device("cpu"))
        digest = hex64(replica.weights_digest())
        if digest != recorded:
            key = "model.base" if config.adapter.init is None else "adapter.init"
            what = f"its weights have digest {digest}, the run began with {recorded}; put it back as it was"
            raise InputError.at(key, what)
    if config.model.quantize != NONE:
        quantize(model, run.device)
    return model.to(run.device)


def scored(run: TrainedRun, data: Examples) -> dict[str, Any]:
    """The scores of `andon eval` as JSON values. `skipped`: the number of unusable rows that were left out.
    `checkpoint`: the step of the weights, unless they are the run's result."""
    scores, read = evaluate_run(run, data), 0 if data.origins is None else len(data.origins.skipped)
    more = {} if run.step is None else {"checkpoint": run.step}
    return labelled(scores.as_dict(), data.labels) | {"skipped": read + len(data) - scores.rows} | more


def rows_of(run: TrainedRun) -> Rows | None:
    """The rows on which the run was trained and scored; None if they are missing or have changed."""
    try:
        rows = read_rows(run.config)
    except InputError:
        return None
    same = rows.digest == read_provenance(run.folder.provenance).digest("data")
    return rows.numbered_by(run.labels) if same else None


@dataclass(frozen=True)
class Answer:
    """What a run's model answers to a prompt. finished: whether it ended with a stop token.

    prompt: the text, or the messages of a conversation, each with `role` and `content`.
    """

    prompt: str | list[dict[str, str]]
    answer: str
    tokens: int
    finished: bool


def answer(run: TrainedRun, prompts: Iterable[str | Sequence[Message]], max_new_tokens: int) -> Iterator[Answer]:
    """Answer each prompt, in order, by greedy decoding.

    A prompt is a list of messages, or a text that becomes a user message, in the format of the training conversations.
    In fp32 the adapter is merged first, which saves most of its time and changes numbers by rounding; in half precision
    or 4 bits a merge would lose part of it. Raises `InputError` for a prompt that leaves no position for an answer.
    """
    merged = any(getattr(each, "merged", False) for each in run.model.modules())
    rounding = half_of(run.model) or run.config.model.quantize != NONE
    if hasattr(run.model, "merge_adapter") and not (merged or rounding):
        run.model.merge_adapter(safe_merge=True)  # type: ignore[operator]
    base = run.tokenizer.base
    setup, limit = GenerationSettings.read(run.folder.adapter), positions_of(without_adapter(run.model)) or sys.maxsize
    waiting, first = iter(prompts), 0
    while window := list(islice(waiting, _PROMPTS)):
        messages = [(Message("user", each),) if isinstance(each, str) else tuple(each) for each in window]
        ids = [encode_prompt(run.tokenizer, setup.form, each) for each in messages]
        problems = ProblemList()
        for number, tokens in enumerate(ids, start=first + 1):
            if len(tokens) >= limit:
                what = f"has {len(tokens)} tokens, and the model has {limit} positions; shorten it"
                problems.add(f"prompt {number}", what)
        problems.raise_if_any()
        first += len(ids)
        most = [min(max_new_tokens, limit - len(tokens)) for tokens in ids]
        for prompt, output in zip(messages, generate(run.model, ids, setup.stops, most), strict=True):
            finished = bool(output) and output[-1] in setup.stops
            text = str(base.decode(output[:-1] if finished else output))
            alone = len(prompt) == 1 and prompt[0].role == "user"
            shown = prompt[0].content if alone else [{"role": each.role, "content": each.content} for each in prompt]
            yield Answer(shown, text, len(output), finished)


def predict(run: TrainedRun, texts: Iterable[str], *, pairs: Iterable[str] | None = None) -> Iterator[Predicted]:
    """Predict each text, in order, in bounded memory. pairs: the second text of each.

    Raises `InputError` if the run was trained on pairs but gets single texts, or the reverse.
    """
    named = run.config.data.text_pair_column
    if (named is None) != (pairs is None):
        what = f"was trained on {'single texts' if named is None else f'pairs, with a second text in {named!r}'}"
        raise InputError.at(run.folder.path, what)
    waiting, others = iter(texts), iter(pairs or ())
    task, labels = run.config.task or CLASSIFICATION, run.labels
    while window := list(islice(waiting, _WINDOW)):
        second = None if pairs is None else list(islice(others, len(window)))
        logits, firsts = logits_of_texts(run, window, second)
        if task == REGRESSION:
            yield from (PredictedNumber(text, float(row[0])) for text, row in zip(window, logits, strict=True))
        elif task == MULTI_LABEL:
            for text, row in zip(window, logits, strict=True):
                chosen = tuple(name for name, above in zip(labels, (row > 0).tolist(), strict=True) if above)
                yield PredictedLabels(text, chosen, dict(zip(labels, row.sigmoid().tolist(), strict=True)))
        elif task == TOKEN_CLASSIFICATION:
            for text, places, row in zip(window, firsts, logits, strict=True):
                best = row.argmax(dim=1).tolist()
                yield PredictedTags(text, tuple(labels[best[place]] if place >= 0 else None for place in places))
        else:
            for text, probabilities in zip(window, torch.stack([*logits]).softmax(dim=1).tolist(), strict=True):
                likeliest = max(range(len(probabilities)), key=probabilities.__getitem__)
                yield Prediction(text, labels[likeliest], probabilities[likeliest], tuple(probabilities))


def logits_of_texts(
    run: TrainedRun, texts: Sequence[str], pairs: Sequence[str] | None
) -> tuple[list[torch.Tensor], Sequence[Sequence[int]]]:
    """Logits of each text, fp32 on the CPU: [outputs], or for token classification [length, tags], with the position of
    each word's first token.

    `EvaluationBatching` groups texts of similar length.
    """
    own, limit = run.tokenizer, run.config.model.max_length
    encoded = own.encode(texts, limit, pairs, words=run.config.task == TOKEN_CLASSIFICATION)
    rows = EncodedRows(
        encoded.tokens, None, pad_id=own.pad_id, vocab_size=own.vocab_size, max_length=limit, columns=encoded.columns
    )
    logits: dict[int, torch.Tensor] = {}
    for batch in EvaluationBatching(_TOKENS, limit=limit).of(rows.lengths.tolist()):
        logits |= zip(batch, predictions(run.model, rows.load(batch, run.device)).cpu(), strict=True)
    return [logits[place] for place in range(len(texts))], encoded.firsts
