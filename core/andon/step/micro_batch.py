"""Micro-batches: their plan, what a pass over one gives, and the reports that `laws.update` holds to the plan.

The rows of a micro-batch are compared as digests that depend on the rows' places in the global batch.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import nn

from andon.backend.devices import on_device
from andon.step.message import WIDTH
from andon.step.task import Batch, Task
from andon_contracts.digest import kernels, mix64
from andon_contracts.laws.update import LeafPlan


@dataclass(frozen=True)
class Leaf:
    """One micro-batch: its index among M, the place of its first row in the global batch, and its rows."""

    index: int
    first: int
    ids: tuple[int, ...]


@dataclass(frozen=True)
class PassResult:
    """What one pass gives besides its gradient: 0-dim tensors on its device.

    loss: the sum. terms: None if each row is one. total: fp64, finite exactly if the gradient is; None if not checked.
    content: int64 [rows], digests of the rows as the pass read them; None if they must be computed from the batch.
    """

    loss: torch.Tensor
    correct: torch.Tensor
    terms: torch.Tensor | None = None
    total: torch.Tensor | None = None
    content: torch.Tensor | None = None


@dataclass
class LeafResult:
    """batch, found: None without rows. gradient: 0-dim int64, its word sum; None if no audit is due."""

    leaf: Leaf
    batch: Batch | None = None
    found: PassResult | None = None
    gradient: torch.Tensor | None = None


def plan_leaves(
    parts: Sequence[tuple[int, ...]], owners: Sequence[range], task: Task, *, checked: bool = True, first: int = 0
) -> tuple[list[Leaf], tuple[LeafPlan, ...]]:
    """Micro-batches from their rows, and what each must be: owner, digest of the rows (0 if not `checked`), terms.

    first: the index of the first micro-batch.
    """
    rank_of = {first + index: rank for rank, run in enumerate(owners) for index in run}
    starts = accumulate(map(len, parts), initial=0)
    leaves = [Leaf(first + index, next(starts), part) for index, part in enumerate(parts)]
    ids, sums = [row for part in parts for row in part], [0] * len(parts)
    if checked and ids:
        sums = bound_sums(task.planned_content(ids), [leaf.first for leaf in leaves], list(map(len, parts))).tolist()
    return leaves, tuple(
        LeafPlan(leaf.index, rank_of[leaf.index], leaf.ids, content, sum(task.planned_terms(leaf.ids)))
        for leaf, content in zip(leaves, sums, strict=True)
    )


def reports_of_leaves(
    results: Sequence[LeafResult], task: Task, device: torch.device, *, checked: bool
) -> torch.Tensor:
    """int64 [len(results), WIDTH] on `device`: one report (`message.REPORT`) for each micro-batch, in their order."""
    if not results:
        return torch.empty((0, WIDTH), dtype=torch.int64, device=device)
    found = [result.found for result in results]
    index, rows = on_device([n for r in results for n in (r.leaf.index, len(r.leaf.ids))], device).view(-1, 2).unbind(1)

    def column(name: str, dtype: torch.dtype) -> torch.Tensor:
        return _column([None if each is None else getattr(each, name) for each in found], dtype, device)

    one_a_row = all(each is None or each.terms is None for each in found)
    columns = (
        index,
        rows,
        # Reals as their bits: messages are integers, and are compared as such.
        column("loss", torch.float64).view(torch.int64),
        column("correct", torch.int64),
        rows if one_a_row else column("terms", torch.int64),
        column("total", torch.float64).view(torch.int64),
        _contents(results, task, device, checked=checked),
        _column([result.gradient for result in results], torch.int64, device),
    )
    return torch.stack(columns, dim=1)


def _column(values: Sequence[torch.Tensor | None], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    present = [value for value in values if value is not None]
    if not present:
        return torch.zeros(len(values), dtype=dtype, device=device)
    if len(present) < len(values):
        none = torch.zeros((), dtype=present[0].dtype, device=device)
        present = [none if value is None else value for value in values]
    return torch.stack(present).to(dtype)


def _contents(results: Sequence[LeafResult], task: Task, device: torch.device, *, checked: bool) -> torch.Tensor:
    """int64 [len(results)]: the digest of each one's rows as the model received them; 0 without rows."""
    given = [(each.leaf, each.batch, each.found) for each in results if each.batch is not None]
    if not given or not checked:
        return torch.zeros(len(results), dtype=torch.int64, device=device)
    known = [None if found is None else found.content for _, _, found in given]
    if all(each is None for each in known):
        rows = task.content(_together([batch for _, batch, _ in given]))
    else:
        rows = torch.cat([task.content(b) if own is None else own for own, (_, b, _) in zip(known, given, strict=True)])
    sums = bound_sums(rows, [leaf.first for leaf, _, _ in given], [len(leaf.ids) for leaf, _, _ in given])
    if len(given) == len(results):
        return sums
    ordered = iter(sums)
    return _column([None if each.batch is None else next(ordered) for each in results], torch.int64, device)


def _together(batches: Sequence[Batch]) -> Batch:
    """Several micro-batches as one, padded with zeros to the widest."""
    if len(batches) == 1:
        return batches[0]
    joined = {}
    for name in batches[0]:
        tensors = [batch[name] for batch in batches]
        sizes = [tensor.shape[1:] for tensor in tensors]
        if len(set(sizes)) > 1:
            widest = list(map(max, *sizes))
            # `pad` takes the last dimension first, and of each what goes before it and behind.
            missing = [[n for w, s in zip(widest, size, strict=True) for n in (w - s, 0)][::-1] for size in sizes]
            tensors = list(map(nn.functional.pad, tensors, missing))
        joined[name] = torch.cat(tensors)
    return joined


def bound_sums(rows: torch.Tensor, firsts: Sequence[int], counts: Sequence[int]) -> torch.Tensor:
    """int64 [len(counts)]: the sum modulo 2^64 of each run of `counts[i]` of the digests `rows`.

    First each digest is mixed with its place in the global batch: run i lies at `firsts[i]`, `firsts[i]` + 1, ...
    """
    starts = list(accumulate(counts, initial=0))
    triton = kernels() if rows.is_cuda else None
    if triton is not None:
        runs = on_device([n for run in zip(starts[:-1], firsts, counts, strict=True) for n in run], rows.device)
        sums: torch.Tensor = triton.bound_sums_on_device(rows, runs.view(-1, 3))
        return sums
    ends = [first + count for first, count in zip(firsts, counts, strict=True)]
    table = _mixed_places(rows.device, max(256, 1 << max(ends).bit_length()))
    if ends[:-1] == list(firsts[1:]):
        places = table[firsts[0] : ends[-1]]
    else:
        places = torch.cat([table[first:end] for first, end in zip(firsts, ends, strict=True)])
    bound = mix64(rows + places)
    return torch.stack([bound[start:end].sum() for start, end in pairwise(starts)])


@functools.lru_cache(maxsize=8)
def _mixed_places(device: torch.device, count: int) -> torch.Tensor:
    """mix(place + 1) of the first `count` places, a power of two."""
    return mix64(torch.arange(1, count + 1, device=device, dtype=torch.int64))
