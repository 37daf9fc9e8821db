"""Micro-batches: their task, their plan, and the reports that `laws.update` compares with the plan.

Rows are compared by digests that depend on their positions in the global batch.

The randomness of a pass is keyed by (seed, step, micro-batch), never by rank or process.
"""

from __future__ import annotations

import functools
import hashlib
import pickle
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Protocol

import numpy as np
import torch
from torch import nn

from andon.backend.devices import on_device
from andon.step.message import WIDTH
from andon_contracts.digest import kernels, mix64
from andon_contracts.laws.update import LeafPlan

Batch = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class LeafLoss:
    """The loss of one micro-batch.

    loss_sum: scalar with its graph, the SUM over its rows (weighted, not averaged). correct: scalar int64, the
    correctly predicted terms. terms: scalar int64, the number of terms in the sum; None: one per row.
    """

    loss_sum: torch.Tensor
    correct: torch.Tensor
    terms: torch.Tensor | None = None


class Task(Protocol):
    """Rows and their loss. The global batch's gradient is d(sum of loss sums) / d(weights) / terms of the batch."""

    def load(self, ids: Sequence[int], device: torch.device) -> Batch:
        """The collated rows `ids` (at least one) on `device`; the first dimension of every tensor is the rows."""
        ...

    def loss_sum(self, model: nn.Module, batch: Batch) -> LeafLoss: ...

    def content(self, batch: Batch) -> torch.Tensor:
        """int64 [rows]: a digest of each row as the model receives it, without padding."""
        ...

    def planned_content(self, ids: Sequence[int]) -> torch.Tensor:
        """int64 [rows]: the digests that `content` must return for these rows."""
        ...

    def planned_terms(self, ids: Sequence[int]) -> Sequence[int]:
        """The number of terms that each of these rows adds to the loss sum: 1 if a row is one term."""
        ...


def key(seed: int, step: int, micro_batch: int) -> int:
    """A 63-bit generator seed for one micro-batch of one step; different arguments give unrelated streams."""
    return int.from_bytes(hashlib.sha256(f"andon {seed} {step} {micro_batch}".encode()).digest()[:8], "little") >> 1


@contextmanager
def keyed_randomness(seed: int, step: int, micro_batch: int, device: torch.device) -> Iterator[None]:
    """Context manager: seed torch's global generators of the CPU and of `device` with a micro-batch's key."""
    stream = key(seed, step, micro_batch)
    # A GPU's generator is not restored: only its rank draws from it.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(stream)
        if device.type == "cuda":
            torch.cuda.default_generators[device.index or 0].manual_seed(stream)
        yield


def refuse_unkeyed(forward: Callable[[], LeafLoss], device: torch.device) -> None:
    """Run `forward`, a pass over one row, twice with one key, and restore the host's generators.

    Raises `ValueError` if the losses differ, or if the second pass advances the global generator of numpy or `random`:
    these are not keyed, so ranks would get different results.
    """
    python_state, numpy_state = random.getstate(), np.random.get_state(legacy=False)
    passes = []
    try:
        for _ in range(2):
            with keyed_randomness(0, 0, 0, device):
                loss = forward().loss_sum.detach().double().view(torch.int64).item()
            passes.append((loss, random.getstate(), pickle.dumps(np.random.get_state(legacy=False))))
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
    if passes[0] != passes[1]:
        msg = (
            "two passes over one row with one seed differ: the model draws from numpy, random or a generator of its "
            "own, or keeps something from pass to pass; use one that draws from torch's global generator alone"
        )
        raise ValueError(msg)


@dataclass(frozen=True)
class Leaf:
    """One micro-batch: its index among M, the position of its first row in the global batch, and its row ids."""

    index: int
    first: int
    ids: tuple[int, ...]


@dataclass(frozen=True)
class PassResult:
    """The result of one pass besides its gradient: 0-dim tensors on its device.

    loss: the loss sum. terms: None if each row is one. total: fp64, finite exactly if the gradient is; None if
    unchecked. content: int64 [rows], digests of the rows as the pass read them; None: not computed yet.
    """

    loss: torch.Tensor
    correct: torch.Tensor
    terms: torch.Tensor | None = None
    total: torch.Tensor | None = None
    content: torch.Tensor | None = None


@dataclass
class LeafResult:
    """batch, found: None without rows. gradient: 0-dim int64, the gradient's word sum; None if no audit is due."""

    leaf: Leaf
    batch: Batch | None = None
    found: PassResult | None = None
    gradient: torch.Tensor | None = None


def plan_leaves(
    parts: Sequence[tuple[int, ...]], owners: Sequence[range], task: Task, *, checked: bool = True, first: int = 0
) -> tuple[list[Leaf], tuple[LeafPlan, ...]]:
    """The micro-batches, and the plan for each: owner, digest of its rows (0 unless `checked`), number of loss terms.

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
    """int64 [len(results), WIDTH] on `device`: one report (`message.REPORT`) per micro-batch, in order."""
    if not results:
        return torch.empty((0, WIDTH), dtype=torch.int64, device=device)
    passes = [result.found for result in results]
    index, rows = on_device([n for r in results for n in (r.leaf.index, len(r.leaf.ids))], device).view(-1, 2).unbind(1)

    def column(name: str, dtype: torch.dtype) -> torch.Tensor:
        return _column([None if each is None else getattr(each, name) for each in passes], dtype, device)

    one_a_row = all(each is None or each.terms is None for each in passes)
    columns = (
        index,
        rows,
        # Reals are sent and compared as their bits.
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
    """int64 [len(results)]: the digest of each micro-batch's rows as the model received them; 0 without rows."""
    full = [(each.leaf, each.batch, each.found) for each in results if each.batch is not None]
    if not full or not checked:
        return torch.zeros(len(results), dtype=torch.int64, device=device)
    known = [None if found is None else found.content for _, _, found in full]
    if all(each is None for each in known):
        rows = task.content(_together([batch for _, batch, _ in full]))
    else:
        rows = torch.cat([task.content(b) if own is None else own for own, (_, b, _) in zip(known, full, strict=True)])
    sums = bound_sums(rows, [leaf.first for leaf, _, _ in full], [len(leaf.ids) for leaf, _, _ in full])
    if len(full) == len(results):
        return sums
    ordered = iter(sums)
    return _column([None if each.batch is None else next(ordered) for each in results], torch.int64, device)


def _together(batches: Sequence[Batch]) -> Batch:
    if len(batches) == 1:
        return batches[0]
    joined = {}
    for name in batches[0]:
        tensors = [batch[name] for batch in batches]
        sizes = [tensor.shape[1:] for tensor in tensors]
        if len(set(sizes)) > 1:
            widest = list(map(max, *sizes))
            # `pad` takes the padding before and after each dimension, starting with the last.
            missing = [[n for w, s in zip(widest, size, strict=True) for n in (w - s, 0)][::-1] for size in sizes]
            tensors = list(map(nn.functional.pad, tensors, missing))
        joined[name] = torch.cat(tensors)
    return joined


def bound_sums(rows: torch.Tensor, firsts: Sequence[int], counts: Sequence[int]) -> torch.Tensor:
    """int64 [len(counts)]: for each run of `counts[i]` consecutive digests in `rows`, their sum modulo 2^64.

    Each digest is first mixed with its position in the global batch: run i starts at position `firsts[i]`.
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
    """mix64(position + 1) for positions 0 to `count` - 1. count: a power of two."""
    return mix64(torch.arange(1, count + 1, device=device, dtype=torch.int64))
