"""The rows and learning rate of each step: functions of the seed and the position, never of the worker count."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from andon.config.schema import Config
from andon_contracts.policy import clause, ensure
from andon_contracts.violation import Finding


@clause(
    "samples-once",
    lambda count, parts, result: Finding(f"{count} items were split into {list(result)} for {parts} parts"),
)
def _bounds_partition(count: int, parts: int, result: Sequence[tuple[int, int]]) -> bool:
    """One range per part; concatenated they are range(count)."""
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
    return tuple(pairwise([part * size + min(part, larger) for part in range(parts + 1)]))


@dataclass(frozen=True)
class GlobalBatch:
    """The rows of one update. `step` counts updates from 1; `position` is the first row's index in the epoch."""

    step: int
    epoch: int
    position: int
    ids: tuple[int, ...]

    def micro_batches(self, count: int) -> tuple[tuple[int, ...], ...]:
        """The rows of each of `count` micro-batches: contiguous and balanced; the last ones may be empty."""
        return tuple(self.ids[start:end] for start, end in balanced_bounds(len(self.ids), count))


@dataclass(frozen=True)
class BatchPlan:
    """The order of all rows over all epochs.

    ids: the training rows. batch_size: rows per update; the last batch of an epoch may be smaller. micro_batches: M,
    the leaves of the gradient sum. lengths: tokens of each row; rows of similar length then share a batch. updates: the
    number per epoch, from ceil(rows / batch_size), which is the default, to the number of rows. If set, batch sizes
    differ by at most one row. Raises `ValueError` for values below 1, no rows, or not one length per row.
    """

    ids: tuple[int, ...]
    batch_size: int
    micro_batches: int
    seed: int
    epochs: int
    max_steps: int | None = None
    lengths: tuple[int, ...] | None = None
    updates: int | None = None
    _orders: dict[int, tuple[int, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.ids:
            raise ValueError("a plan needs at least one row")
        for name in ("batch_size", "micro_batches", "epochs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.lengths is not None and len(self.lengths) != len(self.ids):
            raise ValueError(f"{len(self.lengths)} lengths for {len(self.ids)} rows")

    @functools.cached_property
    def steps_per_epoch(self) -> int:
        return -(-len(self.ids) // self.batch_size) if self.updates is None else self.updates

    @functools.cached_property
    def total_steps(self) -> int:
        steps = self.steps_per_epoch * self.epochs
        return steps if self.max_steps is None else min(steps, self.max_steps)

    def batch(self, step: int) -> GlobalBatch:
        """The rows of update `step`, counted from 1. Raises `ValueError` outside 1 to `total_steps`."""
        if not 1 <= step <= self.total_steps:
            raise ValueError(f"step {step} is outside 1 to {self.total_steps}")
        epoch, index = divmod(step - 1, self.steps_per_epoch)
        position, end = index * self.batch_size, (index + 1) * self.batch_size
        if self.updates is not None:
            rows, longer = divmod(len(self.ids), self.updates)
            position, end = (place * rows + min(place, longer) for place in (index, index + 1))
        # A cache keyed by the rows would hash all of them at every step.
        if epoch not in self._orders:
            self._orders.clear()
            order = epoch_order(self.ids, self.seed, epoch)
            if self.lengths is not None:
                length_of = dict(zip(self.ids, self.lengths, strict=True))
                order = grouped_by_length(order, length_of, self.batch_size, self.seed, epoch)
            self._orders[epoch] = order
        return GlobalBatch(step, epoch, position, self._orders[epoch][position:end])

    def epoch_of(self, step: int) -> int:
        """The epoch, from 0, of update `step`; 0 before the first."""
        return max(step - 1, 0) // self.steps_per_epoch

    def idle_ranks(self, world_size: int) -> int:
        """How many of `world_size` ranks never get a row, because there are too few rows or micro-batches."""
        with_rows = min(self.batch_size, len(self.ids), self.micro_batches)
        return sum(leaves.start >= with_rows for leaves in rank_leaves(self.micro_batches, world_size))

    def is_epoch_end(self, step: int) -> bool:
        return step % self.steps_per_epoch == 0 or step == self.total_steps


def epoch_order(ids: tuple[int, ...], seed: int, epoch: int) -> tuple[int, ...]:
    """The rows in the order of an epoch: a shuffle keyed by (seed, epoch)."""
    order = list(ids)
    random.Random(f"andon order {seed} {epoch}").shuffle(order)
    return tuple(order)


def grouped_by_length(
    order: tuple[int, ...], length_of: Mapping[int, int], batch_size: int, seed: int, epoch: int
) -> tuple[int, ...]:
    """Group rows of similar length: sort each run of 50 batches by length, then shuffle all batches.

    Runs of 50 batches, as in transformers, are long enough to bring similar lengths together and short enough to give
    other batches in another epoch. The shuffle is keyed by (seed, epoch) and keeps row lengths independent of the
    position in the epoch. Exception: a short last batch holds the longest rows of the last run.
    """
    run = 50 * batch_size
    runs = (order[start : start + run] for start in range(0, len(order), run))
    rows = [row for each in runs for row in sorted(each, key=length_of.__getitem__)]
    full = len(rows) // batch_size * batch_size
    batches = [rows[start : start + batch_size] for start in range(0, full, batch_size)]
    random.Random(f"andon batches {seed} {epoch}").shuffle(batches)
    return tuple(itertools.chain(*batches, rows[full:]))


def rank_leaves(micro_batches: int, world_size: int) -> tuple[range, ...]:
    """The micro-batches of each rank: a balanced contiguous range; ranks beyond `micro_batches` get an empty one."""
    return tuple(range(start, end) for start, end in balanced_bounds(micro_batches, world_size))


def efficiency(micro_batches: int, world_size: int) -> float:
    """The utilised share of the ranks' time if all micro-batches cost the same: 0.889 for 3 ranks and M = 8."""
    return micro_batches / (len(rank_leaves(micro_batches, world_size)[0]) * world_size)


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up over w updates, then cosine or linear decay to `min_lr`, or a constant rate.

    w is `warmup_steps`, or floor(warmup_fraction * total_steps) if that is None. Warm-up update t (from 1) has the rate
    peak * t / w; the seed's S29 starts from 0, but an update at rate 0 trains nothing. Update t > w has the rate min +
    (peak - min) * x with p = (t - w) / (total - w): x is (1 + cos(pi * p)) / 2 for cosine and 1 - p for linear.
    """

    config: Config
    total_steps: int

    def rate(self, step: int) -> float:
        """The learning rate of update `step`, counted from 1. Raises `ValueError` for a step outside the run."""
        if not 1 <= step <= self.total_steps:
            raise ValueError(f"step {step} is outside 1 to {self.total_steps}")
        own, peak = self.config.schedule, self.config.optimizer.lr
        warmup = math.floor(own.warmup_fraction * self.total_steps) if own.warmup_steps is None else own.warmup_steps
        if step <= warmup:
            return peak * (step / warmup)
        if own.type == "constant":
            return peak
        progress = (step - warmup) / (self.total_steps - warmup)
        floor = min(own.min_lr, peak)
        decay = 1.0 - progress if own.type == "linear" else (1.0 + math.cos(math.pi * progress)) / 2.0
        return floor + (peak - floor) * decay
