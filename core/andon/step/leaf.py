"""One micro-batch: what it is, what it gave, and the report that its rank makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from andon.step.content import content_sums
from andon.step.readings import on_device
from andon.step.task import Batch, Task


@dataclass(frozen=True)
class Leaf:
    """One micro-batch: its index among M, the place of its first row in the global batch, and its rows."""

    index: int
    first: int
    ids: Sequence[int]


REPORT_FIELDS = ("index", "rows", "loss_bits", "correct", "total_bits", "content", "gradient")
"""The columns of a report: int64 each. `loss_bits` are the bits of the fp64 loss sum, `total_bits` those of an fp64
that is finite exactly where the gradient is; `gradient` is the word sum of the gradient as it was computed, 0 where no
audit is due."""


@dataclass
class LeafResult:
    """What one micro-batch gave besides its gradient: 0-dim tensors on its device, and the rows as they were given.

    batch, loss, correct: None without rows. total, gradient: None where nobody looked.
    """

    leaf: Leaf
    batch: Batch | None = None
    loss: torch.Tensor | None = None
    correct: torch.Tensor | None = None
    total: torch.Tensor | None = None
    gradient: torch.Tensor | None = None


def reports_of_leaves(
    results: Sequence[LeafResult], task: Task, device: torch.device, *, checked: bool
) -> torch.Tensor:
    """int64 [len(results), len(REPORT_FIELDS)] on `device`: one report for each micro-batch, in their order.

    checked: digest the rows that were given, all of them at once.
    """
    if not results:
        return torch.empty((0, len(REPORT_FIELDS)), dtype=torch.int64, device=device)
    known = [number for result in results for number in (result.leaf.index, len(result.leaf.ids))]
    columns = (
        _column([result.loss for result in results], torch.float64, device).view(torch.int64),
        _column([result.correct for result in results], torch.int64, device),
        _column([result.total for result in results], torch.float64, device).view(torch.int64),
        _contents(results, task, device, checked=checked),
        _column([result.gradient for result in results], torch.int64, device),
    )
    return torch.cat([on_device(known, device).view(-1, 2), *(column.unsqueeze(1) for column in columns)], dim=1)


def _column(values: Sequence[torch.Tensor | None], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Scalars as one vector; 0 for what there is none of."""
    present = [value for value in values if value is not None]
    if not present:
        return torch.zeros(len(values), dtype=dtype, device=device)
    if len(present) < len(values):
        none = torch.zeros((), dtype=present[0].dtype, device=device)
        present = [none if value is None else value for value in values]
    return torch.stack(present).to(dtype)


def _contents(results: Sequence[LeafResult], task: Task, device: torch.device, *, checked: bool) -> torch.Tensor:
    """int64 [len(results)]: the digest of the rows of each, bound to their places; 0 without rows."""
    given = [(result.leaf, result.batch) for result in results if result.batch is not None]
    if not given or not checked:
        return torch.zeros(len(results), dtype=torch.int64, device=device)
    sums = content_sums(
        task,
        [batch for _, batch in given],
        [leaf.first for leaf, _ in given],
        [len(leaf.ids) for leaf, _ in given],
    )
    if len(given) == len(results):
        return sums
    places = iter(sums)
    return _column([None if result.batch is None else next(places) for result in results], torch.int64, device)
