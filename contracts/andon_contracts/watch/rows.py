"""Which rows each update trained on: the ids that a loop passes to `Watch.batch`, until the update that used them."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from andon_contracts.watch.values import value_digest


def ids_of(ids: Sequence[int] | torch.Tensor) -> list[int]:
    """Row ids as integers, of anything that Python accepts as an index: numpy's integers, tensors of one element.

    Raises `ValueError` unless `ids` is a flat sequence of integers from 0.
    """
    listed: Iterable[Any] = ids.tolist() if isinstance(ids, torch.Tensor) else ids
    listed = list(listed)
    try:
        rows = [operator.index(each) for each in listed]
    except TypeError:
        rows = [-1]
    # Torch and Python would count a truth value as 1 or 0.
    truths = (isinstance(each, bool) or getattr(each, "dtype", None) is torch.bool for each in listed)
    if any(row < 0 for row in rows) or any(truths):
        msg = f"ids must be a flat sequence of integers from 0, not {str(listed)[:80]}"
        raise ValueError(msg)
    return rows


def contents_of(content: Sequence[object], count: int) -> list[int]:
    """One digest for each row of `content`.

    Raises `ValueError` if its length is not `count`, or if a row holds a value that cannot be compared.
    """
    if len(content) != count:
        msg = f"content has {len(content)} rows, ids has {count}"
        raise ValueError(msg)
    return [value_digest(row, f"content[{index}]") for index, row in enumerate(content)]


@dataclass
class Batch:
    """The rows of one call of `Watch.batch`: their number, and whether its forward pass drew random numbers.

    random: the random state before the forward pass; None: unknown.
    """

    rows: int
    random: torch.Tensor | None = None
    drew: bool = False


class Rows:
    """The rows of the present window on this rank whose gradients the loop has not thrown away."""

    def __init__(self) -> None:
        self.skipped_windows: list[list[int]] = []
        """The rows of each window whose update a loss scaler skipped."""
        self.is_past = False
        """Whether the loop has already computed later gradients than those of the update that is judged."""
        self.discarded = 0
        """How often gradients were thrown away."""
        self.new_window()

    def new_window(self) -> None:
        """Forget the rows: an update used them."""
        self.ids: list[int] = []
        self.contents: list[int] = []
        self.loss_sum, self.loss_rows = 0.0, 0
        self.reported: float | None = None
        self.batches: list[Batch] = []
        self._unused = 0

    def skip_window(self) -> None:
        """Forget the rows, but note them: the window's update is skipped, and its rows are used up all the same."""
        self.skipped_windows.append(self.ids)
        self.new_window()

    def add(self, ids: Sequence[int], contents: Sequence[int]) -> None:
        """Add a batch that is about to be used."""
        self.batches.append(Batch(len(ids)))
        self._unused = len(ids)
        self.ids.extend(ids)
        self.contents.extend(contents)

    def mark_used(self) -> None:
        """Note that the latest batch has been through the backward pass: its rows are in the gradients now."""
        self._unused = 0

    def discard(self) -> None:
        """Forget the rows in the gradients, which were thrown away. A batch without its backward pass stays."""
        self.discarded += 1
        count = len(self.ids) - self._unused
        del self.ids[:count], self.contents[:count]
        self.batches = self.batches[-1:] if self._unused else []

    @contextmanager
    def of_update(self, ids: list[int], *, is_past: bool) -> Iterator[None]:
        """Inside, `ids` are those of the update that is judged, even if the loop has added others since."""
        now, self.ids, self.is_past = self.ids, ids, is_past
        try:
            yield
        finally:
            self.ids, self.is_past = now, False

    @property
    def latest(self) -> Batch | None:
        """The latest batch of this window."""
        return self.batches[-1] if self.batches else None
