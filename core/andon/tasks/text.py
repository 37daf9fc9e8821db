"""Tasks over texts: classification, multi-label, regression and tagging; their batches, losses and scores.

Rows are encoded once, before training (seed S2, C-PRETOK-001). Each row's digest is computed then, and the content of
every batch must match it.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Required, Self, TypedDict, Unpack

import torch
from torch import nn

from andon.console.messages import InputError, ProblemList
from andon.data.tokens import Tokenizer
from andon.metrics.scores import (
    UNREAD,
    ClassificationScores,
    MultiLabelScores,
    RegressionScores,
    Scores,
    SourcedScores,
    SpanScores,
    confusion_of,
    multi_label_scores,
    regression_scores,
    scores,
    span_scores,
)
from andon.model.masks import collate, logits_of, placed, predictions
from andon.step.micro_batch import Batch, LeafLoss
from andon.tasks.sft import FlatRows, PaddedRows, SftTask
from andon_contracts.digest import row_digests

_TABLE_ROWS = 512
NO_TAG = -100
"""The tag of tokens without loss (torch's ignore_index)."""
Columns = Mapping[str, tuple[Sequence[Sequence[int]], int]]
"""By name in a batch: one number per token of each row, and the padding value."""


class RowOptions(TypedDict, total=False):
    """Options of all tasks over texts.

    Batches are padded with pad_id to a multiple of padding_multiple (8), but not beyond max_length. vocab_size: upper
    bound of token ids. places: file and line of each row, for messages. columns: further values per token. cut: the
    rows that were truncated.
    """

    pad_id: Required[int]
    vocab_size: Required[int]
    padding_multiple: int
    max_length: int | None
    places: Sequence[str] | None
    columns: Columns | None
    cut: Sequence[int]


class EncodedRows(PaddedRows):
    """Encoded rows with their labels; a row's id is its position in `tokens`.

    Each task over texts is a subclass that defines its labels (`label_fault`, `label_tensor`), its loss (`loss_sum`),
    the number of loss terms (`planned_terms`) and its scores (`scores_of`).
    """

    width: int
    """The number of outputs per row."""
    output = "logits"

    def __init__(
        self, tokens: Sequence[Sequence[int]], labels: Sequence[Any] | None, **options: Unpack[RowOptions]
    ) -> None:
        """labels: one per row, as the subclass defines them; None for prediction, where rows are not checked.

        Raises `InputError` that names every unusable row by its place (`train.csv:17`): no tokens or more than
        max_length, ids outside the vocabulary, a trailing padding token (a decoder would pool an earlier token), or a
        label that `label_fault` rejects.
        """
        self.pad_id = options["pad_id"]
        self._multiple = options.get("padding_multiple", 8)
        self._limit = options.get("max_length")
        places, problems = options.get("places"), ProblemList()
        if labels is not None and len(tokens) != len(labels):
            raise InputError(f"{len(tokens)} rows of tokens but {len(labels)} labels")
        for index, (row, label) in enumerate(zip(tokens, labels or (), strict=False)):
            token_fault = _token_fault(row, options["vocab_size"], self.pad_id, self._limit)
            for fault in filter(None, (self.label_fault(label), token_fault)):
                problems.add(places[index] if places is not None else f"row {index}", fault)
        problems.raise_if_any()
        self.lengths = torch.tensor([len(row) for row in tokens], dtype=torch.int64)
        self._starts = (torch.cumsum(self.lengths, 0) - self.lengths).tolist()
        self._tokens = _flat(tokens)
        self._labels = EncodedRows.label_tensor(self, tokens) if labels is None else self.label_tensor(labels)
        self._cut = frozenset(options.get("cut", ()))
        columns = options.get("columns") or {}
        self._columns = {name: (_flat(values), padding) for name, (values, padding) in columns.items()}
        self._sources: Sequence[str] = ()
        self._table = torch.zeros(len(self), dtype=torch.int64)
        flat = {"input_ids": self._tokens} | {name: values for name, (values, _) in self._columns.items()}
        for first in range(0, len(self), _TABLE_ROWS):
            lengths, start = self.lengths[first : first + _TABLE_ROWS], self._starts[first]
            real = torch.arange(int(lengths.max())) < lengths.unsqueeze(1)
            batch = {"attention_mask": real, "labels": self._labels[first : first + _TABLE_ROWS]}
            for name, values in flat.items():
                batch[name] = torch.zeros(real.shape, dtype=torch.int64)
                batch[name][real] = values[start : start + int(lengths.sum())].long()
            self._table[first : first + _TABLE_ROWS] = self.content(batch)

    def label_fault(self, label: Any) -> str:
        """The reason a label is unusable, or empty. Checks only what the readers of data files do not."""
        return ""

    def label_tensor(self, labels: Sequence[Any]) -> torch.Tensor:
        """int64 [rows] or [rows, values]; [rows, 0] if the labels are per token, in a column."""
        return torch.empty((len(labels), 0), dtype=torch.int64)

    def in_copies(self, copies: int) -> Self:
        """The N rows repeated `copies` times: copy k of row r has the id r + k * N (`mixed`)."""
        task = copy.copy(self)
        task.lengths, task._starts = self.lengths.repeat(copies), self._starts * copies
        task._table = self._table.repeat(copies)
        task._labels = torch.cat([self._labels] * copies)
        return task

    def by_source(self, sources: Sequence[str]) -> Self:
        """The same rows, also scored by source. sources: one per row."""
        task = copy.copy(self)
        task._sources = sources
        return task

    def cut_rows(self, ids: Sequence[int]) -> int:
        return sum(id_ in self._cut for id_ in ids)

    def load(self, ids: Sequence[int], device: torch.device) -> Batch:
        """Rows `ids` on `device`, int64: input_ids, attention_mask and each column [rows, length], and labels.

        Right-padded with pad_id and mask 0. Raises `ValueError` without ids, `IndexError` for unknown ids.
        """
        self._require_known(ids)
        spans = [slice(self._starts[row], self._starts[row] + int(self.lengths[row])) for row in ids]
        batch = collate([self._tokens[span] for span in spans], self.pad_id, self._multiple, self._limit)
        for name, (values, padding) in self._columns.items():
            column = torch.full_like(batch["input_ids"], padding)
            for place, span in enumerate(spans):
                column[place, : span.stop - span.start] = values[span]
            batch[name] = column
        if self._labels.numel():
            batch["labels"] = self._labels[list(ids)]
        return placed(batch, device)

    def content(self, batch: Batch) -> torch.Tensor:
        """int64 [rows]: the digest of each row of the batch: of its labels, then of 2 * id + mask and the columns for
        each unpadded token."""
        mask = batch["attention_mask"]
        values = batch["input_ids"] * 2 + mask
        lengths = mask.sum(dim=1)
        if self._columns:
            values = torch.stack([values, *(batch[name] for name in self._columns)], dim=2).flatten(1)
            lengths = lengths * (1 + len(self._columns))
        if not self._labels.numel():
            return row_digests(values, lengths)
        labels = batch["labels"] if self._labels.dim() == 2 else batch["labels"].unsqueeze(1)
        return row_digests(torch.cat([labels, values], dim=1), lengths + labels.shape[1])

    def planned_terms(self, ids: Sequence[int]) -> Sequence[int]:
        """The number of loss terms of each row: 1, whatever the weight of its class."""
        return (1,) * len(ids)

    def outputs(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """fp32 [rows, width]. Eval mode, no gradients."""
        return predictions(model, batch)

    def loss_sum(self, model: nn.Module, batch: Batch) -> LeafLoss:
        """Forward and loss of one micro-batch."""
        raise NotImplementedError

    def scores_of(self, ids: Sequence[int], outputs: torch.Tensor) -> Scores:
        """Scores of these rows from their outputs, fp64 [rows, width] on the CPU."""
        raise NotImplementedError

    def score(self, ids: Sequence[int], outputs: torch.Tensor) -> Scores:
        """`scores_of` all these rows and, if sources are set, of each source's rows."""
        whole = self.scores_of(ids, outputs)
        by_source: dict[str, list[int]] = {}
        for place, row in enumerate(ids if self._sources else ()):
            by_source.setdefault(self._sources[row], []).append(place)
        if not by_source:
            return whole
        sources = {
            name: self.scores_of([ids[place] for place in by_source[name]], outputs[by_source[name]])
            for name in sorted(by_source)
        }
        return SourcedScores(whole, sources)

    def learned(self, row: int) -> str:
        """The row's label as readable text."""
        raise NotImplementedError

    def shown(self, row: int, tokenizer: Tokenizer) -> Iterator[str]:
        """Yield a line with the row's label, then a line per token: position, id and text."""
        yield f"row {row}: {int(self.lengths[row])} tokens, {self.learned(row)}"
        start = self._starts[row]
        for place, id_ in enumerate(self._tokens[start : start + int(self.lengths[row])].tolist()):
            yield f"{place:6} {id_:7}  {tokenizer.shown(id_)}"

    def require_fit(self, model: nn.Module, device: torch.device) -> None:
        """No check needed: the model was built for these rows."""


def _flat(rows: Sequence[Sequence[int]]) -> torch.Tensor:
    if isinstance(rows, FlatRows):
        return rows.flat
    return torch.tensor(list(itertools.chain.from_iterable(rows)), dtype=torch.int64)


def _token_fault(row: Sequence[int], vocab_size: int, pad_id: int, max_length: int | None) -> str:
    if not row:
        return "the text gives no tokens"
    if max_length is not None and len(row) > max_length:
        return f"{len(row)} tokens are more than max_length {max_length}; cut the row, or set model.max_length higher"
    lowest, highest = min(row), max(row)
    if lowest < 0 or highest >= vocab_size:
        wrong = lowest if lowest < 0 else highest
        return f"token id {wrong} is outside of the vocabulary of {vocab_size} ids"
    if row[-1] == pad_id:
        return f"the text ends with the padding token (id {pad_id}); a model would take it for padding"
    return ""


class ClassificationTask(EncodedRows):
    """Single-label classification. The outputs are logits [rows, classes].

    The loss is the SUM over rows of w[label] * cross entropy in fp32 (seed S5); the step divides it once by the number
    of rows of the global batch. torch's weighted mean would divide by the sum of the weights, and the loss built into a
    transformers model depends on the dtype of the labels, so neither is used.
    """

    def __init__(
        self,
        tokens: Sequence[Sequence[int]],
        labels: Sequence[int],
        *,
        num_labels: int,
        class_weights: Sequence[float] | None = None,
        names: Sequence[str] = (),
        **options: Unpack[RowOptions],
    ) -> None:
        """labels: the class of each row. class_weights: w, one per class (None: all 1). names: of the classes.

        Raises `InputError` as `EncodedRows` does, also for a label outside 0 to num_labels - 1.
        """
        self.num_labels = self.width = num_labels
        self._names = tuple(names)
        super().__init__(tokens, labels, **options)
        weights = [1.0] * num_labels if class_weights is None else list(class_weights)
        self._weights = {torch.device("cpu"): torch.tensor(weights, dtype=torch.float32)}

    def label_fault(self, label: int) -> str:
        known = isinstance(label, int) and not isinstance(label, bool) and 0 <= label < self.num_labels
        fault = f"label {label!r} is not one of the {self.num_labels} classes 0 to {self.num_labels - 1}"
        return "" if known else fault

    def label_tensor(self, labels: Sequence[int]) -> torch.Tensor:
        return torch.tensor(list(labels), dtype=torch.int64)

    def loss_sum(self, model: nn.Module, batch: Batch) -> LeafLoss:
        """fp32 sum over the rows of w[label] * cross entropy, and the number of rows whose argmax is the label."""
        logits, labels = logits_of(model, batch), batch["labels"]
        return LeafLoss(self.row_losses(logits, labels).sum(), (logits.detach().argmax(dim=1) == labels).sum())

    def row_losses(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """fp32 [rows]: w[label] * cross entropy. Sum them with `math.fsum` for a result independent of row order."""
        device = logits.device
        # Cached per device: a copy from the host would synchronize between the forward and the backward pass.
        if device not in self._weights:
            self._weights[device] = self._weights[torch.device("cpu")].to(device)
        return nn.functional.cross_entropy(logits.float(), labels, reduction="none") * self._weights[device][labels]

    def learned(self, row: int) -> str:
        number = int(self._labels[row])
        return f"class {number}" + (f" ({self._names[number]})" if self._names else "")

    def scores_of(self, ids: Sequence[int], outputs: torch.Tensor) -> ClassificationScores:
        logits, labels = outputs.float(), self._labels[list(ids)]
        confusion = confusion_of(logits.argmax(dim=1), labels, self.num_labels)
        losses: list[float] = self.row_losses(logits, labels).double().tolist()
        positive = (logits[:, 1] - logits[:, 0]).tolist() if self.num_labels == 2 else None
        return scores(confusion, positive, labels.tolist(), losses)


class MultiLabelTask(EncodedRows):
    """Multi-label classification with multi-hot labels. The outputs are logits [rows, labels].

    A label is predicted if its logit is above 0. The loss is the SUM over rows and labels of the binary cross entropy,
    in fp32. It has rows * labels terms, so the step divides by the same count as torch's BCEWithLogitsLoss for its
    mean.
    """

    def __init__(
        self,
        tokens: Sequence[Sequence[int]],
        labels: Sequence[Sequence[int]],
        *,
        num_labels: int,
        names: Sequence[str] = (),
        **options: Unpack[RowOptions],
    ) -> None:
        """labels: the label numbers of each row. names: of the labels. Raises `InputError` as `EncodedRows` does."""
        self.width = num_labels
        self._names = tuple(names)
        super().__init__(tokens, labels, **options)

    def label_tensor(self, labels: Sequence[Sequence[int]]) -> torch.Tensor:
        wanted = torch.zeros((len(labels), self.width), dtype=torch.int64)
        for row, numbers in enumerate(labels):
            wanted[row, list(numbers)] = 1
        return wanted

    def planned_terms(self, ids: Sequence[int]) -> Sequence[int]:
        return (self.width,) * len(ids)

    def loss_sum(self, model: nn.Module, batch: Batch) -> LeafLoss:
        """fp32 sum over rows and labels of the binary cross entropy, the number of correct labels, and of all."""
        logits, wanted = logits_of(model, batch), batch["labels"]
        right = ((logits.detach() > 0) == (wanted == 1)).sum()
        return LeafLoss(_label_losses(logits, wanted).sum(), right, torch.full_like(right, wanted.numel()))

    def learned(self, row: int) -> str:
        numbers = self._labels[row].nonzero().flatten().tolist()
        return f"labels {numbers}" + (f" ({', '.join(self._names[each] for each in numbers)})" if self._names else "")

    def scores_of(self, ids: Sequence[int], outputs: torch.Tensor) -> MultiLabelScores:
        wanted = self._labels[list(ids)]
        losses: list[float] = _label_losses(outputs.float(), wanted).double().flatten().tolist()
        return multi_label_scores(outputs > 0, wanted == 1, losses)


def _label_losses(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """fp32 [rows, labels]. Sum them with `math.fsum` for a result independent of row order."""
    logits = logits.float()
    return nn.functional.binary_cross_entropy_with_logits(logits, wanted.to(logits.dtype), reduction="none")


class RegressionTask(EncodedRows):
    """Regression with one output. The loss is the SUM over rows of the squared error.

    The error is the fp64 difference of the model's fp32 output and the target, in training and in scoring. In a batch,
    `labels` are the fp64 bits of the targets as int64, so they reach the device and the digest unrounded.
    """

    output = "number"
    counts_right = False
    width = 1

    def label_tensor(self, labels: Sequence[float]) -> torch.Tensor:
        return torch.tensor(list(labels), dtype=torch.float64).view(torch.int64)

    def loss_sum(self, model: nn.Module, batch: Batch) -> LeafLoss:
        """fp64 sum over the rows of the squared error. `correct` is 0: a number is not right or wrong."""
        error = logits_of(model, batch)[:, 0].double() - batch["labels"].view(torch.float64)
        return LeafLoss(error.square().sum(), torch.zeros((), dtype=torch.int64, device=error.device))

    def learned(self, row: int) -> str:
        return f"number {float(self._labels[row].view(torch.float64)):g}"

    def scores_of(self, ids: Sequence[int], outputs: torch.Tensor) -> RegressionScores:
        return regression_scores(outputs[:, 0].tolist(), self._labels[list(ids)].view(torch.float64).tolist())


class TaggingTask(EncodedRows):
    """Token classification with one tag per word, at its first token; in a batch, `labels` [rows, length].

    The loss is the SUM over words of the cross entropy of the first token, in fp32. Other tokens of a word and special
    tokens are model input without loss. Loss terms are words, so the step's mean is over all words of the global batch.

    The outputs of a row are two numbers per word, in order: the most likely tag and the word's loss; then zeros.
    """

    output = "losses"

    def __init__(
        self,
        tokens: Sequence[Sequence[int]],
        tags: Sequence[Sequence[int]],
        *,
        names: Sequence[str],
        unread: Mapping[int, Mapping[int, int]] | None = None,
        **options: Unpack[RowOptions],
    ) -> None:
        """tags: one per token, or `NO_TAG`. names: of the tags. unread: by row and word position, the tag of each word
        without a token, for example after truncation; scores count such a word as wrong.

        Raises `InputError` as `EncodedRows` does, also for a row without a tag.
        """
        self.names = tuple(names)
        self._tags = [[tag for tag in row if tag != NO_TAG] for row in tags]
        self.width = 2 * max(map(len, self._tags), default=0)
        self._unread = dict(unread or {})
        options["columns"] = {**(options.get("columns") or {}), "labels": (tags, NO_TAG)}
        super().__init__(tokens, tags, **options)

    def label_fault(self, label: Sequence[int]) -> str:
        return "" if any(tag != NO_TAG for tag in label) else "no word of it has a token"

    def in_copies(self, copies: int) -> Self:
        task = super().in_copies(copies)
        task._tags = self._tags * copies
        return task

    def planned_terms(self, ids: Sequence[int]) -> Sequence[int]:
        return [len(self._tags[row]) for row in ids]

    def loss_sum(self, model: nn.Module, batch: Batch) -> LeafLoss:
        """fp32 sum over the words of the cross entropy, the number of correct words, and of all."""
        logits, tags = logits_of(model, batch), batch["labels"]
        right = (logits.detach().argmax(dim=2) == tags).sum()
        return LeafLoss(_tag_losses(logits, tags).sum(), right, (tags != NO_TAG).sum())

    def learned(self, row: int) -> str:
        return " ".join(self.names[tag] for tag in self._tags[row])

    def outputs(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        logits, tags = predictions(model, batch), batch["labels"]
        tagged = tags != NO_TAG
        places = 2 * (tagged.cumsum(dim=1) - 1)[tagged]
        rows = tagged.nonzero()[:, 0]
        table = torch.zeros((len(tags), self.width), dtype=torch.float64, device=tags.device)
        table[rows, places] = logits.argmax(dim=2)[tagged].double()
        table[rows, places + 1] = _tag_losses(logits, tags)[tagged].double()
        return table

    def scores_of(self, ids: Sequence[int], outputs: torch.Tensor) -> SpanScores:
        rows = [row[: 2 * len(self._tags[id_])] for id_, row in zip(ids, outputs.tolist(), strict=True)]
        losses = [loss for row in rows for loss in row[1::2]]
        predicted = [[self.names[int(tag)] for tag in row[::2]] for row in rows]
        actual = [[self.names[tag] for tag in self._tags[id_]] for id_ in ids]
        for id_, guess, truth in zip(ids, predicted, actual, strict=True):
            for place, tag in sorted(self._unread.get(id_, {}).items()):
                guess.insert(place, UNREAD)
                truth.insert(place, self.names[tag])
        return span_scores(predicted, actual, self.names, math.fsum(losses) / max(len(losses), 1))


def _tag_losses(logits: torch.Tensor, tags: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.float().transpose(1, 2), tags, ignore_index=NO_TAG, reduction="none")


ScoredTask = EncodedRows | SftTask
"""A `Task` of the step whose rows the trainer also scores.

`outputs` gives `width` numbers per row, the same on every rank; `output` names them in messages. `score` is computed on
every rank from the gathered outputs of all rows, so it is bit-identical for any number of ranks.
"""
