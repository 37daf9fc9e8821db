"""The twelve mutants that the seed's own 25 tests let live (seed 5.1)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from andon.coordinator import DataParallelCoordinator
from andon.pipeline import BatchResult, ClassifyPipeline
from andon.step.plan import GlobalBatch
from andon.step.step import StepResult
from andon_falsify.faults.planting import (
    PLAIN,
    SGD,
    Fault,
    around,
    current_batch,
    followers,
    patched,
    scaled_partials,
    unsynced,
    with_plan,
    with_result,
)
from andon_falsify.subjects.assembly import Parts


def _everything(_: str) -> bool:
    return True


def _is_bias(name: str) -> bool:
    return name.endswith("bias")


def _returns_zeros(coordinator: DataParallelCoordinator, _: ExitStack) -> None:
    def train(inner: Callable[..., BatchResult], samples: Any) -> BatchResult:
        inner(samples)
        return BatchResult(0.0, 0, 0, 0.0)

    around(coordinator, "train_batch_parallel", train)


def _no_sync(parts: Parts, _: ExitStack) -> None:
    for replica in followers(parts).values():
        unsynced(replica, _everything)


def _mean_of_means(parts: Parts, _: ExitStack) -> None:
    def change(result: StepResult) -> StepResult:
        sums: dict[int, list[float]] = {}
        for leaf in result.leaves:
            held = sums.setdefault(leaf.rank, [0.0, 0.0])
            held[0] += leaf.loss_sum
            held[1] += leaf.rows
        means = [loss / rows for loss, rows in sums.values() if rows]
        return replace(result, loss=sum(means) / len(means))

    with_result(parts, change)


def _last_shard_untrained(parts: Parts, _: ExitStack) -> None:
    last = parts.by_rank.get(parts.backend.world_size - 1)
    if last is not None:
        scaled_partials(last, lambda partial: 0.0)


class _Overlapping(GlobalBatch):
    """Every micro-batch but the last also has the first row of the next."""

    def micro_batches(self, count: int) -> tuple[tuple[int, ...], ...]:
        """See the class."""
        parts = super().micro_batches(count)
        return tuple(part + following[:1] for part, following in zip(parts, (*parts[1:], ()), strict=True))


def _overlapping(parts: Parts, _: ExitStack) -> None:
    with_plan(parts, lambda batch: _Overlapping(batch.step, batch.epoch, batch.position, batch.ids))


def _bias_unsynced(parts: Parts, _: ExitStack) -> None:
    for replica in followers(parts).values():
        unsynced(replica, _is_bias)


def _only_first_synced(parts: Parts, _: ExitStack) -> None:
    for rank, replica in followers(parts).items():
        if rank > 1:
            unsynced(replica, _everything)


def idle(parts: Parts, ranks: Callable[[int], bool], falls_back: Callable[[int, int], bool]) -> None:
    """On the batches where falls_back(rows, world), the replicas of `ranks` take no update."""
    batch = current_batch(parts)

    def apply(inner: Callable[[], None]) -> None:
        if not falls_back(len(batch().ids), parts.backend.world_size):
            inner()

    for rank, replica in parts.by_rank.items():
        if ranks(rank):
            around(replica, "apply", apply)


def _fallback_at_equality(parts: Parts, _: ExitStack) -> None:
    idle(parts, lambda rank: rank > 0, lambda rows, world: rows <= world)


def _fallback_trains_nothing(parts: Parts, _: ExitStack) -> None:
    idle(parts, lambda rank: True, lambda rows, world: rows < world)


def _primary_is_last(_: DataParallelCoordinator, stack: ExitStack) -> None:
    def last(self: DataParallelCoordinator) -> ClassifyPipeline:
        return self.pipelines[-1]

    patched(stack, DataParallelCoordinator, "primary_pipeline", property(last))


def _tenfold_rate(parts: Parts, _: ExitStack) -> None:
    for replica in followers(parts).values():
        around(replica, "set_rate", lambda inner, rate: inner(10 * rate))


def _no_norm(parts: Parts, _: ExitStack) -> None:
    with_result(parts, lambda result: replace(result, grad_norm=0.0))


_SOURCE = "seed 5.1, survived"
FAULTS = (
    Fault("train_batch_parallel returns zeros", _SOURCE, "losses-close", _returns_zeros, PLAIN, "coordinator"),
    Fault("no sync", _SOURCE, "replicas-agree", _no_sync, SGD),
    Fault("loss is a mean of shard means", _SOURCE, "losses-close", _mean_of_means, SGD),
    Fault("last shard not trained", _SOURCE, "gradient-law", _last_shard_untrained, SGD),
    Fault("shards overlap", _SOURCE, "samples-once", _overlapping, PLAIN),
    Fault("bias not synced", _SOURCE, "replicas-agree", _bias_unsynced, SGD.but(architecture="encoder")),
    Fault("only the first replica synced", _SOURCE, "replicas-agree", _only_first_synced, SGD.but(world=3)),
    # 11 rows in batches of 3: the last batch has as many rows as there are replicas.
    Fault("fallback at n = replicas", _SOURCE, "replicas-agree", _fallback_at_equality, SGD.but(batch_size=3)),
    Fault("fallback trains nothing", _SOURCE, "update-law", _fallback_trains_nothing, SGD),
    Fault("primary is the last replica", _SOURCE, "coordinator-face", _primary_is_last, PLAIN, "coordinator"),
    Fault("replicas with tenfold rate", _SOURCE, "replicas-agree", _tenfold_rate, SGD),
    Fault("grad_norm is always 0", _SOURCE, "norm-law", _no_norm, SGD),
)
