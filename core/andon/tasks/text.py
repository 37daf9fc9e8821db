"""The tasks over texts: encoded rows with a class, several labels, a number or tags; their batches, losses and scores.

Rows are encoded once, before training (seed S2, C-PRETOK-001). Each row has a digest from then on, which the content of
every batch must match.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Required, Self, TypedDict, Unpack

import torch
from torch import nn

from andon.console.problems import InputError, ProblemList
from andon.data.tokens import Tokenizer
from andon.metrics.confusion import confusion_of
from andon.metrics.scores import (
    ClassificationScores,
    MultiLabelScores,
    RegressionScores,
    Scores,
    SourcedScores,
    multi_label_scores,
    regression_scores,
    scores,
)
from andon.metrics.spans import UNREAD, SpanScores, span_scores
from andon.model.batches import collate, logits_of, placed, predictions
from andon.step.task import Batch, LeafLoss
from andon.tasks.sft import SftTask
from andon.tasks.token_rows import FlatRows, PaddedRows
from andon_contracts.digest import row_digests

_TABLE_ROWS = 512
NO_TAG = -100
"""The tag of a token without loss."""
Columns = Mapping[str, tuple[Sequence[Sequence[int]], int]]
"""By its name in a batch: a number for each token of each row, and the padding value."""


class RowOptions(TypedDict, total=False):
    """Options of all tasks over texts.

    Batches are padded with pad_id to a multiple of padding_multiple (8), but never beyond max_length. vocab_size: token
    ids are below it. places: the origin of each row, for messages. columns: more numbers for each token. cut: the rows
    whose end was cut off.
    """

    pad_id: Required[int]
    vocab_size: Required[int]
    padding_multiple: int
    max_length: int | None
    places: Sequence[str] | None
    columns: Columns | None
    cut: Sequence[int]


class EncodedRows(PaddedRows):
    """Encoded rows and what is learned of each; a row's id is its position in `tokens`.

    A task over texts subclasses it with the form of its labels (`label_fault`, `label_tensor`), its loss (`loss_sum`),
    the number of its terms (`planned_terms`) and its scores (`scores_of`).
    """

    width: int
    """Outputs of a row."""
    output = "logits"

    def __init__(
        self, tokens: Sequence[Sequence[int]], labels: Sequence[Any] | None, **options: Unpack[RowOptions]
    ) -> None:
        """labels: one a row, as the subclass defines them; None: rows to predict, which are not checked.

        Raises `InputError` that names every unusable row by its place (`train.csv:17`): no tokens or more than
        max_length, ids outside of the vocabulary, padding at its end (a decoder would pool an earlier token), or a
        label with a `label_fault`.
        """
        self.pad_id = options["pad_id"]
        self._multiple = options.get("padding_multiple", 8)
        self._limit = options.get("max_length")
        places, found = options.get("places"), ProblemList()
        if labels is not None and len(tokens) != len(labels):
            raise InputError(f"{len(tokens)} rows of tokens but {len(labels)} labels")
        for index, (row, label) in enumerate(zip(tokens, labels or (), strict=False)):
            token_fault = _token_fault(row, options["vocab_size"], self.pad_id, self._limit)
            for fault in filter(None, (self.label_fault(label), token_fault)):
                found.add(places[index] if places is not None else f"row {index}", fault)
        found.raise_if_any()
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
        """Why a label is unusable; empty if it is usable. What readers have refused already is not checked again."""
        return ""

    def label_tensor(self, labels: Sequence[Any]) -> torch.Tensor:
        """int64 [rows] or [rows, numbers]; [rows, 0] if the labels are in a column."""
        return torch.empty((len(labels), 0), dtype=torch.int64)

    def in_copies(self, copies: int) -> Self:
        """Each of the N rows several times, for training: copy k of row r has the id r + k * N (`mixed`)."""
        found = copy.copy(self)
        found.lengths, found._starts = self.lengths.repeat(copies), self._starts * copies
        found._table = self._table.repeat(copies)
        found._labels = torch.cat([self._labels] * copies)
        return found

    def by_source(self, sources: Sequence[str]) -> Self:
        """The same rows, also scored by source. sources: one for each row."""
        found = copy.copy(self)
        found._sources = sources
        return found

    def cut_rows(self, ids: Sequence[int]) -> int:
        return sum(id_ in self._cut for id_ in ids)

    def load(self, ids: Sequence[int], device: torch.device) -> Batch:
        """Rows `ids` on `device`: input_ids, attention_mask and each column [rows, length], and labels; all int64.

        Padded on the right with pad_id, with mask 0. Raises `ValueError` without ids, `IndexError` for unknown ids.
        """
        self._require_known(ids)
        spans = [slice(self._starts[row], self._starts[row] + int(self.lengths[row])) for row in ids]
        batch = collate([self._tokens[span].long() for span in spans], self.pad_id, self._multiple, self._limit)
        for name, (values, padding) in self._columns.items():
            column = torch.full_like(batch["input_ids"], padding)
            for place, span in enumerate(spans):
                column[place, : span.stop - span.start] = values[span]
            batch[name] = column
        if self._labels.numel():
            batch["labels"] = self._labels[list(ids)]
        return placed(batch, device)

    def content(self, batch: Batch) -> torch.Tensor:
        """int64 [rows]: the digest of each row in the batch: its labels, then for each token 2 * id + mask and the
        columns, for as many tokens as the mask is 1."""
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
        """The loss terms of each row: one, whatever the row's weight."""
        return (1,) * len(ids)

    def outputs(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """fp32 [rows, width], in eval mode and without a graph."""
        return predictions(model, batch)

    def loss_sum(self, model: nn.Module, batch: Batch) -> LeafLoss:
        """Forward and loss of one micro-batch."""
        raise NotImplementedError

    def scores_of(self, ids: Sequence[int], outputs: torch.Tensor) -> Scores:
        """The scores of these rows from their outputs, fp64 [rows, width] on the CPU."""
        raise NotImplementedError

    def score(self, ids: Sequence[int], outputs: torch.Tensor) -> Scores:
        """`scores_of` these rows, and of each source's rows among them."""
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
        """The row's label as text, for a person."""
        raise NotImplementedError

    def shown(self, row: int, tokenizer: Tokenizer) -> Iterator[str]:
        """A line with the row's label, and for each token its position, its id and its text."""
        yield f"row {row}: {int(self.lengths[row])} tokens, {self.learned(row)}"
        start = self._starts[row]
        for place, id_ in enumerate(self._tokens[start : start + int(self.lengths[row])].tolist()):
            yield f"{place:6} {id_:7}  {tokenizer.shown(id_)}"

    def require_fit(self, model: nn.Module, device: torch.device) -> None:
        """Nothing to check: every model that was built for these rows can read them."""


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
    """Rows with one class each. The outputs are logits [rows, classes].

    The loss is the SUM over rows of w[label] * cross entropy in fp32 (seed S5); the step divides it once by the number
    of rows of the global batch. torch's weighted mean would divide by the sum of the weights, and a model's own loss
    guesses its kind from the dtype of the labels, so neither is used.
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
        """labels: the class of each row. class_weights: w, one a class (None: all 1). names: of the classes.

        Raises `InputError` as `EncodedRows` does, also for a label that is no class.
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
        """Sum over the batch's rows of w[label] * cross entropy, in fp32, and the rows whose argmax is the label."""
        logits, labels = logits_of(model, batch), batch["labels"]
        return LeafLoss(self.row_losses(logits, labels).sum(), (logits.detach().argmax(dim=1) == labels).sum())

    def row_losses(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """fp32 [rows]: w[label] * cross entropy. Their exact sum (`math.fsum`) is the same in any order of rows."""
        device = logits.device
        # Kept on each device: a copy from the host would wait for the device between a forward and its backward.
        if device not in self._weights:
            self._weights[device] = self._weights[torch.device("cpu")].to(device)
        weights = self._weights[device][labels]
        return nn.functional.cross_entropy(logits.float(), labels, reduction="none") * weights

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
    """Rows with any number of labels each, in a batch as 0 and 1. The outputs are logits [rows, labels].

    Each label is a separate yes or no, predicted if its logit is above 0. The loss is the SUM over rows and labels of
    the binary cross entropy of a logit, in fp32; it has rows * labels terms, so the step divides by the same count as
    torch's BCEWithLogitsLoss for its mean.
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
        """Sum over rows and labels of the binary cross entropy, in fp32, and how many labels are predicted right."""
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
    """fp32 [rows, labels]. Their exact sum (`math.fsum`) is the same in any order of rows."""
    logits = logits.float()
    return nn.functional.binary_cross_entropy_with_logits(logits, wanted.to(logits.dtype), reduction="none")


class RegressionTask(EncodedRows):
    """Rows with a target number each, for a model with one output. The loss is the SUM over rows of the squared error.

    The error is the fp64 difference of the model's fp32 number and the target, so training and scoring use one number.
    In a batch, `labels` are the bits of the numbers in fp64, so they reach the device and the digest unrounded.
    """

    output = "number"
    counts_right = False
    width = 1

    def label_tensor(self, labels: Sequence[float]) -> torch.Tensor:
        return torch.tensor(list(labels), dtype=torch.float64).view(torch.int64)

    def loss_sum(self, model: nn.Module, batch: Batch) -> LeafLoss:
        """Sum over the batch's rows of the squared error, in fp64. No number is right or wrong: `correct` is 0."""
        error = logits_of(model, batch)[:, 0].double() - batch["labels"].view(torch.float64)
        return LeafLoss(error.square().sum(), torch.zeros((), dtype=torch.int64, device=error.device))

    def learned(self, row: int) -> str:
        return f"number {float(self._labels[row].view(torch.float64)):g}"

    def scores_of(self, ids: Sequence[int], outputs: torch.Tensor) -> RegressionScores:
        return regression_scores(outputs[:, 0].tolist(), self._labels[list(ids)].view(torch.float64).tolist())


class TaggingTask(EncodedRows):
    """Rows with tags of some of their tokens; in a batch they are `labels` [rows, length].

    The loss is the SUM over words of the cross entropy of each word's first token, in fp32. The model reads the other
    tokens of a word and the special tokens, but they have no loss. Terms are words, so a long row counts more than a
    short one, as in a mean over all words of a global batch.

    The outputs of a row are two numbers for each word, in order: the likeliest tag and the word's loss; then zeros.
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
        """tags: one for each token, or `NO_TAG`. names: of the tags. unread: by row and by the word's position in it,
        the tag of each word without a token, for example after a cut; scores count such a word as missed.

        Raises `InputError` as `EncodedRows` does, also for a row without a tag.
        """
        self.names = tuple(names)
        self._tags = [[tag for tag in row if tag != NO_TAG] for row in tags]
        self.width = 2 * max(map(len, self._tags), default=0)  # two for each word of the longest row
        self._unread = dict(unread or {})
        options["columns"] = {**(options.get("columns") or {}), "labels": (tags, NO_TAG)}
        super().__init__(tokens, tags, **options)

    def label_fault(self, label: Sequence[int]) -> str:
        return "" if any(tag != NO_TAG for tag in label) else "no word of it has a token"

    def in_copies(self, copies: int) -> Self:
        found = super().in_copies(copies)
        found._tags = self._tags * copies
        return found

    def planned_terms(self, ids: Sequence[int]) -> Sequence[int]:
        return [len(self._tags[row]) for row in ids]

    def loss_sum(self, model: nn.Module, batch: Batch) -> LeafLoss:
        """Sum over the batch's words of the cross entropy, in fp32, their number, and how many are right."""
        logits, tags = logits_of(model, batch), batch["labels"]
        right = (logits.detach().argmax(dim=2) == tags).sum()
        return LeafLoss(_tag_losses(logits, tags).sum(), right, (tags != NO_TAG).sum())

    def learned(self, row: int) -> str:
        return " ".join(self.names[tag] for tag in self._tags[row])

    def outputs(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        logits, tags = predictions(model, batch), batch["labels"]
        there = tags != NO_TAG
        places = 2 * (there.cumsum(dim=1) - 1)[there]
        rows = there.nonzero()[:, 0]
        table = torch.zeros((len(tags), self.width), dtype=torch.float64, device=tags.device)
        table[rows, places] = logits.argmax(dim=2)[there].double()
        table[rows, places + 1] = _tag_losses(logits, tags)[there].double()
        return table

    def scores_of(self, ids: Sequence[int], outputs: torch.Tensor) -> SpanScores:
        found = [row[: 2 * len(self._tags[id_])] for id_, row in zip(ids, outputs.tolist(), strict=True)]
        losses = [loss for row in found for loss in row[1::2]]
        predicted = [[self.names[int(tag)] for tag in row[::2]] for row in found]
        actual = [[self.names[tag] for tag in self._tags[id_]] for id_ in ids]
        for id_, guess, truth in zip(ids, predicted, actual, strict=True):
            for place, tag in sorted(self._unread.get(id_, {}).items()):
                guess.insert(place, UNREAD)
                truth.insert(place, self.names[tag])
        return span_scores(predicted, actual, self.names, math.fsum(losses) / max(len(losses), 1))


def _tag_losses(logits: torch.Tensor, tags: torch.Tensor) -> torch.Tensor:
    """fp32 [rows, length]; 0 for tokens without a tag."""
    return nn.functional.cross_entropy(logits.float().transpose(1, 2), tags, ignore_index=NO_TAG, reduction="none")


ScoredTask = EncodedRows | SftTask
"""A `Task` of the step whose rows the trainer also scores.

`outputs` gives `width` numbers for a row, the same on every rank; `output` is the word for them in messages. `score` is
a function of the outputs of all rows, computed on every rank, so it is bit-identical on any number of ranks.
"""
