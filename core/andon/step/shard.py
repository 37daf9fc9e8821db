"""Splits of a sequence over workers: balanced for the step, and the seed's own rule."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

from andon_contracts.policy import argument, clause, ensure, require
from andon_contracts.violation import Finding

T = TypeVar("T")


def _explain_bounds(count: int, parts: int, result: Sequence[tuple[int, int]]) -> Finding:
    return Finding(seen=f"{count} items were split into {list(result)} for {parts} parts")


@clause("samples-once", _explain_bounds)
def _bounds_partition(count: int, parts: int, result: Sequence[tuple[int, int]]) -> bool:
    """One range for each part; end to end they are range(count)."""
    ends = [0, *(end for _, end in result)]
    return len(result) == parts and ends == [*(start for start, _ in result), count]


@ensure(_bounds_partition)
def balanced_bounds(count: int, parts: int) -> tuple[tuple[int, int], ...]:
    """F-DP-002: `parts` contiguous half-open ranges that cover range(count), with sizes that differ by at most one.

    The first `count % parts` ranges are the larger ones; with count < parts the last ranges are empty.
    Raises `ValueError` for count < 0 or parts < 1.
    """
    if count < 0 or parts < 1:
        raise ValueError(f"cannot split {count} items into {parts} parts")
    size, larger = divmod(count, parts)
    starts = [part * size + min(part, larger) for part in range(parts + 1)]
    return tuple(pairwise(starts))


def _explain_workers(num_workers: int) -> str:
    return f"num_workers must be at least 1, got {num_workers}"


@argument(_explain_workers)
def _has_workers(num_workers: int) -> bool:
    return num_workers >= 1


def _explain_shards(samples: Sequence[T], num_workers: int, result: Sequence[Sequence[T]]) -> Finding:
    sizes = [len(shard) for shard in result]
    return Finding(seen=f"{len(samples)} samples became {len(sizes)} shards of {sizes} for {num_workers} workers")


@clause("samples-once", _explain_shards)
def _shards_partition(samples: Sequence[T], num_workers: int, result: Sequence[Sequence[T]]) -> bool:
    """One shard a worker; end to end they are the samples, each object once and in order."""
    joined = [sample for shard in result for sample in shard]
    return (
        len(result) == num_workers
        and len(joined) == len(samples)
        and all(a is b for a, b in zip(joined, samples, strict=True))
    )


@require(_has_workers)
@ensure(_shards_partition)
def shard_samples(samples: Sequence[T], num_workers: int) -> list[list[T]]:
    """Contiguous shards, one a worker; each has floor(n / num_workers) samples and the last also the remainder.

    The rule of the seed (R26, F-DP-002), with two of its edge cases mended (V13): no samples give `num_workers` empty
    shards, and fewer than one worker is a `ValueError`. The training step itself splits evenly (`balanced_bounds`).
    """
    items = list(samples)
    size = len(items) // num_workers
    ends = [(worker + 1) * size for worker in range(num_workers - 1)] + [len(items)]
    starts = [worker * size for worker in range(num_workers)]
    return [items[start:end] for start, end in zip(starts, ends, strict=True)]
