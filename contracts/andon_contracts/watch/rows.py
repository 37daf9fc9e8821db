"""Which rows each update trained on: the ids that a loop tells, kept until the update that used them."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from andon_contracts.watch.values import value_digest


def ids_of(ids: Sequence[int] | torch.Tensor) -> list[int]:
    """Row ids as integers, of anything that counts as one: numpy's, tensors of one element.

    Raises `ValueError` for what is no flat sequence of integers.
    """
    given: Iterable[Any] = ids.tolist() if isinstance(ids, torch.Tensor) else ids
    given = list(given)
    try:
        found = [operator.index(each) for each in given]
    except TypeError:
        found = [-1]
    if any(row < 0 for row in found) or any(_is_truth(each) for each in given):
        msg = f"ids must be a flat sequence of integers from 0, not {str(given)[:80]}"
        raise ValueError(msg)
    return found


def _is_truth(value: object) -> bool:
    """Whether it is true or false, which torch and Python would count as 1 and 0."""
    return isinstance(value, bool) or getattr(value, "dtype", None) is torch.bool


def contents_of(content: Sequence[object], count: int) -> list[int]:
    """One digest for each row of `content`.

    Raises `ValueError` where its length is not `count`, and for a row that holds what cannot be compared.
    """
    if len(content) != count:
        msg = f"content has {len(content)} rows, ids has {count}"
        raise ValueError(msg)
    return [value_digest(row, f"content[{index}]") for index, row in enumerate(content)]


@dataclass
class Batch:
    """The rows of one call of `Watch.batch`: their number, and how its forward pass drew random numbers."""

    rows: int
    random: torch.Tensor | None = None
    drew: bool = False


class Rows:
    """The rows of the present window on this rank: told, and not thrown away since."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.contents: list[int] = []
        self.loss_sum = 0.0
        self.loss_rows = 0
        self.reported: float | None = None
        self.batches: list[Batch] = []
        self.skipped_windows: list[list[int]] = []
        """Those of windows that were computed and whose update a loss scaler left out, by window."""
        self.used = False
        self.is_past = False
        """Whether the loop has gone on from the update that is looked at, with other gradients and buffers."""
        self.discarded = 0
        """How often gradients were thrown away."""
        self._unused = 0

    def add(self, ids: Sequence[int], contents: Sequence[int]) -> None:
        """A batch is about to be used."""
        self.used = True
        self.batches.append(Batch(len(ids)))
        self._unused = len(ids)
        self.ids.extend(ids)
        self.contents.extend(contents)

    def mark_used(self) -> None:
        """The batch at hand has been through the backward pass: it shares the fate of the gradients."""
        self._unused = 0

    def discard(self) -> None:
        """The gradients so far were thrown away, and with them all rows but those of the batch at hand."""
        self.discarded += 1
        kept = len(self.ids) - self._unused
        del self.ids[:kept], self.contents[:kept]
        self.batches = self.batches[-1:] if self._unused else []

    @contextmanager
    def of_update(self, ids: list[int], *, is_past: bool) -> Iterator[None]:
        """Inside, what is told is of the update that was made of these rows, whichever have come since."""
        now, self.ids, self.is_past = self.ids, ids, is_past
        try:
            yield
        finally:
            self.ids, self.is_past = now, False

    def skip_window(self) -> None:
        """The window's update is left out: its rows are used up all the same."""
        self.skipped_windows.append(self.ids)
        self.new_window()

    def new_window(self) -> None:
        """The update has used them."""
        self.ids, self.contents = [], []
        self.loss_sum, self.loss_rows, self.reported = 0.0, 0, None
        self.batches, self._unused = [], 0

    @property
    def latest(self) -> Batch | None:
        """The batch that was told last in this window."""
        return self.batches[-1] if self.batches else None
