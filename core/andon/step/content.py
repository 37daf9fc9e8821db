"""Digests of the rows that a model was given, bound to their places in the global batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import torch
from torch import nn

from andon.step.readings import on_device
from andon.step.task import Batch, Task
from andon_contracts.digest import mix64
from andon_contracts.triton_kernels import has_triton

_LEAST_PLACES = 256


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
    kernel = _kernel() if rows.is_cuda else None
    if kernel is None:
        return run_sums(bind_to_places(rows, firsts, counts), counts)
    starts = accumulate(counts, initial=0)
    runs = [value for run in zip(starts, firsts, counts, strict=False) for value in run]
    return kernel(rows, on_device(runs, rows.device).view(-1, 3))


@functools.cache
def _kernel() -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None:
    """Binding and summing in one launch; None where Triton is not installed."""
    if not has_triton():
        return None
    from andon_contracts.rows_cuda import bound_sums_on_device

    return bound_sums_on_device
