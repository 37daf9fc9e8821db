"""One micro-batch: what it is, what it gave, and the report that its rank makes of it: also of which rows it was given,
as digests that are bound to their places in the global batch.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import nn

from andon.step.readings import on_device
from andon.step.task import Batch, Task
from andon_contracts.digest import kernels, mix64

_LEAST_PLACES = 256


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


@functools.lru_cache(maxsize=8)
def _mixed_places(device: torch.device, count: int) -> torch.Tensor:
    return mix64(torch.arange(1, count + 1, device=device, dtype=torch.int64))


def _places(device: torch.device, first: int, count: int) -> torch.Tensor:
    """mix(place + 1) of `count` places from `first` on; a view into a table that grows by doubling."""
    size = max(_LEAST_PLACES, 1 << (first + count).bit_length())
    return _mixed_places(device, size)[first : first + count]


def bind_to_places(rows: torch.Tensor, firsts: Sequence[int], counts: Sequence[int]) -> torch.Tensor:
    """Digests of rows [sum(counts)] int64, bound to their places in the global batch.

    Run i of `counts[i]` rows lies at the places `firsts[i]`, `firsts[i]` + 1, ...
    """
    ends = [first + count for first, count in zip(firsts, counts, strict=True)]
    if all(end == first for end, first in zip(ends, firsts[1:], strict=False)):
        places = _places(rows.device, firsts[0], sum(counts)) if firsts else rows
    else:
        parts = [_places(rows.device, first, count) for first, count in zip(firsts, counts, strict=True)]
        places = torch.cat(parts)
    return mix64(rows + places)


def run_sums(bound: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """int64 [len(counts)]: the sums modulo 2^64 of consecutive runs of `bound`."""
    ends = [0]
    for count in counts:
        ends.append(ends[-1] + count)
    return torch.stack([bound[start:end].sum() for start, end in pairwise(ends)])


def together(batches: Sequence[Batch]) -> Batch:
    """Several micro-batches as one, end to end; what is narrower than the widest is padded with zeros behind."""
    if len(batches) == 1:
        return batches[0]
    return {name: _stacked([batch[name] for batch in batches]) for name in batches[0]}


def _stacked(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    sizes = {tensor.shape[1:] for tensor in tensors}
    if len(sizes) == 1:
        return torch.cat(list(tensors))
    widest = [max(size[place] for size in sizes) for place in range(tensors[0].dim() - 1)]
    missing = [
        [extent for place in reversed(range(len(widest))) for extent in (0, widest[place] - tensor.shape[1 + place])]
        for tensor in tensors
    ]
    return torch.cat([nn.functional.pad(t, padding) for t, padding in zip(tensors, missing, strict=True)])


def content_sums(task: Task, batches: Sequence[Batch], firsts: Sequence[int], counts: Sequence[int]) -> torch.Tensor:
    """int64 [len(batches)]: the bound content of each micro-batch as the model was given it, on its device."""
    rows = task.content(together(batches))
    there = kernels() if rows.is_cuda else None
    if there is None:
        return run_sums(bind_to_places(rows, firsts, counts), counts)
    starts = accumulate(counts, initial=0)
    runs = [value for run in zip(starts, firsts, counts, strict=False) for value in run]
    found: torch.Tensor = there.bound_sums_on_device(rows, on_device(runs, rows.device).view(-1, 3))
    return found
