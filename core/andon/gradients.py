"""The seed's free functions: the mean of workers' gradients, a test for NaN and Inf, sharding of samples.

`average_gradients` gives every worker the same weight (seed R27). For shards of unequal size that is not the gradient
of the global batch (V8), so the training step does not use it. Use it for workers with equally many rows.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import TypeVar, overload

import torch

from andon_contracts.policy import argument, clause, ensure, require
from andon_contracts.violation import Finding

Gradient = Sequence[float] | torch.Tensor
T = TypeVar("T")


def _size(gradient: Gradient) -> str:
    return f"shape {tuple(gradient.shape)}" if isinstance(gradient, torch.Tensor) else f"length {len(gradient)}"


def _explain_lengths(grads: Sequence[Gradient]) -> str:
    sizes = [_size(gradient) for gradient in grads]
    worker = next(i for i, size in enumerate(sizes) if size != sizes[0])
    return f"worker {worker} has a gradient of {sizes[worker]} where worker 0 has {sizes[0]}; by worker: {sizes}"


@argument(_explain_lengths)
def _same_lengths(grads: Sequence[Gradient]) -> bool:
    return len(set(map(_size, grads))) <= 1


def _fp32(values: Gradient) -> torch.Tensor:
    tensor = values if isinstance(values, torch.Tensor) else torch.tensor(values, dtype=torch.float32)
    return tensor.detach().to(torch.float32).reshape(-1)


def _checked_mean(grads: Sequence[Gradient], average: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp64 [n], the mean. bool [n]: where `average` differs from it beyond fp32 rounding, or only it is finite."""
    # Scales each gradient before adding it, unlike the code that is checked.
    mean = torch.zeros_like(_fp32(grads[0]), dtype=torch.float64)
    largest = torch.zeros_like(mean)
    for gradient in grads:
        own = _fp32(gradient).to(mean.device).double()
        mean += own / len(grads)
        largest = torch.maximum(largest, own.abs())
    # One ulp of fp32, relative to the largest summand. The smallest positive fp32 is about 1e-45.
    close = (average.double() - mean).abs() <= 2.0**-23 * largest + 2e-45
    same = (average.isnan() & mean.isnan()) | (average == mean)
    return mean, ~(same | (close & average.isfinite() & mean.isfinite()))


def _explain_average(grads: Sequence[Gradient], result: Gradient | list[float]) -> Finding:
    average = _fp32(result)
    mean, wrong = _checked_mean(grads, average)
    place = int(wrong.nonzero()[0])
    seen = f"element {place} is {float(average[place])!r}, the mean of the workers {float(mean[place])!r}"
    return Finding(seen, tensor=f"averaged gradient [{place}]")


@clause("gradient-average", _explain_average)
def _is_the_mean(grads: Sequence[Gradient], result: Gradient | list[float]) -> bool:
    if not grads:
        return len(result) == 0
    average = _fp32(result)
    return average.shape == _fp32(grads[0]).shape and not bool(_checked_mean(grads, average)[1].any())


@overload
def average_gradients(grads: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tensors of one shape give a tensor of that shape."""


@overload
def average_gradients(grads: Sequence[Sequence[float]]) -> list[float]:
    """Lists of one length give a list of that length."""


@require(_same_lengths)
@ensure(_is_the_mean)
def average_gradients(grads: Sequence[Gradient]) -> torch.Tensor | list[float]:
    """avg[j] = (1/N) * sum over workers of g[j], all workers with equal weight (seed R27; F-DP-003).

    grads: one gradient per worker, all lists of reals of one length or all tensors of one shape; converted to fp32.
    Returns the same type: a list of fp32 values, or an fp32 tensor of that shape on the first worker's device; []
    without workers. Sums in fp64 in worker order, so finite inputs give a finite result (V11); NaN and Inf propagate.
    Raises `ValueError` naming the worker and the lengths if they differ (V12), or if lists and tensors are mixed.
    """
    if not grads:
        return []
    total = torch.zeros_like(_fp32(grads[0]), dtype=torch.float64)
    for gradient in grads:
        total += _fp32(gradient).to(total.device)
    average = (total / len(grads)).to(torch.float32)
    first = grads[0]
    if isinstance(first, torch.Tensor):
        return average.reshape(first.shape)
    values: list[float] = average.tolist()
    return values


def has_non_finite(values: Gradient) -> bool:
    """Whether any element is NaN, Inf or -Inf (seed R28). False without elements."""
    if isinstance(values, torch.Tensor):
        return not bool(torch.isfinite(values).all())
    return not all(math.isfinite(value) for value in values)


@argument(lambda num_workers: f"num_workers must be at least 1, got {num_workers}")
def _has_workers(num_workers: int) -> bool:
    return num_workers >= 1


def _explain_shards(samples: Sequence[T], num_workers: int, result: Sequence[Sequence[T]]) -> Finding:
    sizes = [len(shard) for shard in result]
    return Finding(seen=f"{len(samples)} samples became {len(sizes)} shards of {sizes} for {num_workers} workers")


@clause("samples-once", _explain_shards)
def _shards_partition(samples: Sequence[T], num_workers: int, result: Sequence[Sequence[T]]) -> bool:
    joined = [sample for shard in result for sample in shard]
    return len(result) == num_workers and len(joined) == len(samples) and all(map(operator.is_, joined, samples))


@require(_has_workers)
@ensure(_shards_partition)
def shard_samples(samples: Sequence[T], num_workers: int) -> list[list[T]]:
    """Contiguous shards, one per worker, of floor(n / num_workers) samples; the last also gets the remainder.

    The rule of the seed (R26, F-DP-002), with two of its edge cases fixed (V13): no samples give `num_workers` empty
    shards, and fewer than one worker is a `ValueError`. The training step itself splits evenly (`balanced_bounds`).
    """
    items = list(samples)
    size = len(items) // num_workers
    ends = [(worker + 1) * size for worker in range(num_workers - 1)] + [len(items)]
    return [items[worker * size : end] for worker, end in enumerate(ends)]
