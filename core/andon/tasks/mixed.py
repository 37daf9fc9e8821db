"""The rows of several files as one task: some several times in an epoch, each time under an id of its own, and scored
by file too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from andon.data.tokens import Tokenizer
from andon.metrics.confusion import Confusion
from andon.metrics.scores import Scores
from andon.step.task import Batch, LeafLoss
from andon.tasks.task import ScoredTask


@dataclass(frozen=True)
class SourcedScores:
    """The scores of all rows, and those of each source by itself."""

    whole: Scores
    sources: Mapping[str, Scores]

    @property
    def rows(self) -> int:
        """How many rows were scored."""
        return self.whole.rows

    @property
    def loss(self) -> float | None:
        """The mean over all rows."""
        return self.whole.loss

    @property
    def confusion(self) -> Confusion | None:
        """The confusion matrix of all rows, where the task has one."""
        return self.whole.confusion

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON: those of all rows, and of each of `sources` its numbers."""
        numbers = {
            name: {key: value for key, value in each.as_dict().items() if isinstance(value, int | float)}
            for name, each in self.sources.items()
        }
        return self.whole.as_dict() | {"sources": numbers}


class MixedRows:
    """Copy k of row r of a task with N rows is a row by itself, with the id r + k * N, as `data.mixing` has it.

    A `ScoredTask` of `copies * N` rows that keeps nothing but the task. sources: one for each of the N rows, by which
    they are scored too; none: the task knows sources itself, or there are none.
    """

    def __init__(self, task: ScoredTask, copies: int, sources: Sequence[str] = ()) -> None:
        self._task = task
        self._rows = len(task)
        self._copies = copies
        self._sources = sources
        self.output, self.notes, self.counts_right = task.output, task.notes, task.counts_right

    def __len__(self) -> int:
        return self._rows * self._copies

    def _of(self, ids: Sequence[int]) -> list[int]:
        if ids and not 0 <= min(ids) <= max(ids) < len(self):
            msg = f"rows {min(ids)} to {max(ids)} asked of a task with {self._rows} rows, {self._copies} times each"
            raise IndexError(msg)
        return [id_ % self._rows for id_ in ids]

    @property
    def lengths(self) -> torch.Tensor:
        """int64 [rows]: tokens of each row."""
        return self._task.lengths.repeat(self._copies)

    def padded_to(self, multiple: int, max_length: int) -> MixedRows:
        """The same rows; batches of them are padded to a multiple of `multiple`, but never beyond `max_length`."""
        return MixedRows(self._task.padded_to(multiple, max_length), self._copies, self._sources)

    @property
    def width(self) -> int:
        """How many numbers a row has."""
        return self._task.width

    def cut_rows(self, ids: Sequence[int]) -> int:
        """How many of these rows were cut at their end."""
        return self._task.cut_rows(self._of(ids))

    def load(self, ids: Sequence[int], device: torch.device) -> Batch:
        """The collated rows, each copy as its row is. Raises as the task does."""
        return self._task.load(self._of(ids), device)

    def loss_sum(self, model: nn.Module, batch: Batch) -> LeafLoss:
        """Forward and loss of one micro-batch."""
        return self._task.loss_sum(model, batch)

    def content(self, batch: Batch) -> torch.Tensor:
        """int64 [rows]: the digest of what the model is given for each row."""
        return self._task.content(batch)

    def planned_content(self, ids: Sequence[int]) -> torch.Tensor:
        """int64 [rows]: what `content` must give for these rows."""
        return self._task.planned_content(self._of(ids))

    def planned_terms(self, ids: Sequence[int]) -> Sequence[int]:
        """For each of these rows, how many terms of the loss sum are its own."""
        return self._task.planned_terms(self._of(ids))

    def shown(self, row: int, tokenizer: Tokenizer) -> Iterator[str]:
        """A row for a reader, as the model is given it."""
        yield from self._task.shown(self._of([row])[0], tokenizer)

    def require_fit(self, model: nn.Module, device: torch.device) -> None:
        """Raise `InputError` for a model that cannot be given these rows."""
        self._task.require_fit(model, device)

    def outputs(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """[rows of the batch, width], in eval mode and without a graph."""
        return self._task.outputs(model, batch)

    def score(self, ids: Sequence[int], outputs: torch.Tensor) -> Scores:
        """The scores of these rows by their outputs, and of each source's rows among them."""
        rows = self._of(ids)
        whole = self._task.score(rows, outputs)
        if not self._sources:
            return whole
        by_source: dict[str, list[int]] = {}
        for place, row in enumerate(rows):
            by_source.setdefault(self._sources[row], []).append(place)
        return SourcedScores(
            whole,
            {
                name: self._task.score([rows[place] for place in by_source[name]], outputs[by_source[name]])
                for name in sorted(by_source)
            },
        )
