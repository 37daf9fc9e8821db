"""The base class of all tasks over texts: encoded rows, their batches and their digests.

Rows are encoded once, before training (seed S2, C-PRETOK-001). Each row has a digest from then on, which the content of
every batch must match.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Required, Self, TypedDict, Unpack

import torch
from torch import nn

from andon.console.problems import ProblemList
from andon.data.tokens import Tokenizer
from andon.metrics.confusion import Confusion
from andon.metrics.scores import Scores
from andon.model.batches import collate, placed, predictions
from andon.step.task import Batch, LeafLoss
from andon_contracts.digest import row_digests

_TABLE_ROWS = 512
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


@dataclass(frozen=True)
class SourcedScores:
    """The scores of all rows, and of the rows of each source."""

    whole: Scores
    sources: Mapping[str, Scores]

    @property
    def rows(self) -> int:
        return self.whole.rows

    @property
    def loss(self) -> float | None:
        return self.whole.loss

    @property
    def confusion(self) -> Confusion | None:
        return self.whole.confusion

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON: the scores of all rows, and the numbers among those of each source."""
        numbers = {
            name: {key: value for key, value in each.as_dict().items() if isinstance(value, int | float)}
            for name, each in self.sources.items()
        }
        return self.whole.as_dict() | {"sources": numbers}


class EncodedRows:
    """Encoded rows and what is learned of each; a row's id is its position in `tokens`.

    A task over texts subclasses it with the form of its labels (`label_fault`, `label_tensor`), its loss (`loss_sum`),
    the number of its terms (`planned_terms`) and its scores (`scores_of`).
    """

    width: int
    """Outputs of a row."""
    notes: tuple[str, ...] = ()
    output = "logits"
    counts_right = True

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
        if labels is not None:
            self._check(tokens, labels, options)
        self._lengths = torch.tensor([len(row) for row in tokens], dtype=torch.int64)
        self._starts = (torch.cumsum(self._lengths, 0) - self._lengths).tolist()
        self._tokens = _flat(tokens)
        none = torch.empty((len(tokens), 0), dtype=torch.int64)
        self._labels = none if labels is None else self.label_tensor(labels)
        self._cut = frozenset(options.get("cut", ()))
        columns = options.get("columns") or {}
        self._columns = {name: (_flat(values), padding) for name, (values, padding) in columns.items()}
        self._sources: Sequence[str] = ()
        self._table = self._digest_rows()

    def label_fault(self, label: Any, tokens: Sequence[int]) -> str:
        """Why the label of a row with these tokens is unusable; empty if it is usable."""
        raise NotImplementedError

    def label_tensor(self, labels: Sequence[Any]) -> torch.Tensor:
        """int64 [rows] or [rows, numbers]; [rows, 0] if the labels are in a column."""
        raise NotImplementedError

    def __len__(self) -> int:
        return self._lengths.numel()

    def padded_to(self, multiple: int, max_length: int) -> Self:
        """The same rows with batches padded to a multiple of `multiple`, but never beyond `max_length`."""
        found = copy.copy(self)
        found._multiple, found._limit = multiple, max_length
        return found

    def in_copies(self, copies: int) -> Self:
        """Each of the N rows several times, for training: copy k of row r has the id r + k * N (`data.mixing`)."""
        found = copy.copy(self)
        found._lengths, found._starts = self._lengths.repeat(copies), self._starts * copies
        found._table = self._table.repeat(copies)
        found._labels = torch.cat([self._labels] * copies)
        return found

    def by_source(self, sources: Sequence[str]) -> Self:
        """The same rows, also scored by source. sources: one for each row."""
        found = copy.copy(self)
        found._sources = sources
        return found

    @property
    def lengths(self) -> torch.Tensor:
        """int64 [rows]: tokens of each row."""
        return self._lengths

    def cut_rows(self, ids: Sequence[int]) -> int:
        return sum(id_ in self._cut for id_ in ids)

    def load(self, ids: Sequence[int], device: torch.device) -> Batch:
        """Rows `ids` on `device`: input_ids, attention_mask and each column [rows, length], and labels; all int64.

        Padded on the right with pad_id, with mask 0. Raises `ValueError` without ids, `IndexError` for unknown ids.
        """
        if not ids:
            raise ValueError("a batch needs at least one row")
        count = len(self)
        if min(ids) < 0 or max(ids) >= count:
            msg = f"rows {min(ids)} to {max(ids)} asked of a task with {count} rows"
            raise IndexError(msg)
        spans = [slice(self._starts[row], self._starts[row] + int(self._lengths[row])) for row in ids]
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
        """int64 [rows]: the digest of each row's tokens, mask, columns and labels in the batch, without padding.

        The digest of a row is of (labels, 2 * id + mask, columns, 2 * id + mask, ...), for as many tokens as mask 1.
        """
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

    def planned_content(self, ids: Sequence[int]) -> torch.Tensor:
        """int64 [len(ids)] on the CPU: the `content` that these rows must have, computed when the task was made."""
        return self._table[list(ids)]

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
        yield f"row {row}: {int(self._lengths[row])} tokens, {self.learned(row)}"
        start = self._starts[row]
        for place, id_ in enumerate(self._tokens[start : start + int(self._lengths[row])].tolist()):
            yield f"{place:6} {id_:7}  {tokenizer.shown(id_)}"

    def require_fit(self, model: nn.Module, device: torch.device) -> None:
        """Nothing to check: every model that was built for these rows can read them."""

    def _check(self, tokens: Sequence[Sequence[int]], labels: Sequence[Any], options: RowOptions) -> None:
        places, found = options.get("places"), ProblemList()
        if len(tokens) != len(labels):
            found.add("", f"{len(tokens)} rows of tokens but {len(labels)} labels")
            found.raise_if_any()
        for index, (row, label) in enumerate(zip(tokens, labels, strict=True)):
            where = places[index] if places is not None else f"row {index}"
            token_fault = _token_fault(row, options["vocab_size"], options["pad_id"], options.get("max_length"))
            for fault in filter(None, (self.label_fault(label, row), token_fault)):
                found.add(where, fault)
        found.raise_if_any()

    def _digest_rows(self) -> torch.Tensor:
        table = torch.zeros(len(self), dtype=torch.int64)
        for first in range(0, len(self), _TABLE_ROWS):
            lengths = self._lengths[first : first + _TABLE_ROWS]
            real = torch.arange(int(lengths.max())) < lengths.unsqueeze(1)
            start = self._starts[first]
            flat = {"input_ids": self._tokens} | {name: values for name, (values, _) in self._columns.items()}
            batch = {"attention_mask": real}
            for name, values in flat.items():
                batch[name] = torch.zeros(real.shape, dtype=torch.int64)
                batch[name][real] = values[start : start + int(lengths.sum())]
            if self._labels.numel():
                batch["labels"] = self._labels[first : first + _TABLE_ROWS]
            table[first : first + _TABLE_ROWS] = self.content(batch)
        return table


def _flat(rows: Sequence[Sequence[int]]) -> torch.Tensor:
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
