"""Mutants of the seed (seed 5.1): those that its own 25 tests missed, those that they caught, and those to add.

A suite for data parallelism must see all of them. The mutants of the seed's free functions are in `functions`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from andon.coordinator import DataParallelCoordinator
from andon.pipeline import BatchResult
from andon.step.micro_batch import LeafLoss
from andon.step.plan import GlobalBatch
from andon.step.replica import PartialGradient, Replica
from andon.step.step import StepResult
from andon_falsify.compliance.cases import ADAMW, PLAIN, SGD
from andon_falsify.subjects.assembly import TrainerUnderTest
from andon_falsify.subjects.case import Poison
from andon_falsify.subjects.watching import Proxy

from .planting import (
    Fault,
    Plant,
    after_updates,
    around,
    around_each,
    around_updates,
    current_batch,
    local_sum,
    on_replicas,
    rows_of,
    scaled_partials,
    unsynced,
    with_result,
)

_UNSYNCED = "step 1, rank 1: the gradient differs"


# missed by the seed's own tests


def _returns_zeros(coordinator: DataParallelCoordinator, _: ExitStack) -> None:
    def train(inner: Callable[..., BatchResult], samples: Any) -> BatchResult:
        inner(samples)
        return BatchResult(0.0, 0, 0, 0.0)

    around(coordinator, "train_batch_parallel", train)


def _mean_of_means(result: StepResult) -> StepResult:
    sums: dict[int, list[float]] = {}
    for leaf in result.leaves:
        held = sums.setdefault(leaf.rank, [0.0, 0.0])
        held[0] += leaf.loss_sum
        held[1] += leaf.rows
    means = [loss / rows for loss, rows in sums.values() if rows]
    return replace(result, loss=sum(means) / len(means))


class _Overlapping(GlobalBatch):
    """Every micro-batch except the last also has the first row of the next one."""

    def micro_batches(self, count: int) -> tuple[tuple[int, ...], ...]:
        parts = super().micro_batches(count)
        return tuple(part + following[:1] for part, following in zip(parts, (*parts[1:], ()), strict=True))


def _overlapping(parts: TrainerUnderTest, _: ExitStack) -> None:
    inner = parts.plan.batch

    def batch(step: int) -> GlobalBatch:
        right = inner(step)
        return _Overlapping(right.step, right.epoch, right.position, right.ids)

    parts.plan = Proxy(parts.plan, batch=batch)  # type: ignore[assignment]


def _idle(first: int, falls_back: Callable[[int, int], bool] = lambda rows, world: rows < world) -> Plant:
    """On the batches where falls_back(rows, world), the ranks from `first` on take no update."""

    def plant(parts: TrainerUnderTest, stack: ExitStack) -> None:
        batch = current_batch(parts)

        def apply(inner: Callable[[], None]) -> None:
            if not falls_back(len(batch().ids), parts.backend.world_size):
                inner()

        around_each("apply", apply, first)(parts, stack)

    return plant


MISSED = (
    Fault("train_batch_parallel returns zeros", "losses-close", "step 1: .* at 3 of 3 updates; .*seen 0; ratio 0",
          _returns_zeros, PLAIN, "coordinator"),
    Fault("no sync", "replicas-agree", _UNSYNCED, unsynced(), SGD),
    Fault("loss is a mean of shard means", "losses-close",
          r"step 1: .* at 2 of 3 updates; .*seen 1\.072", with_result(_mean_of_means), SGD),
    Fault("last shard not trained", "gradient-law",
          r"step 1: 8 of 15 tensors .*score\.weight 0\.57",
          on_replicas(lambda replica: scaled_partials(replica, lambda partial: 0.0), first=SGD.world - 1), SGD),
    Fault("shards overlap", "samples-once", "step 1: rows used more than once, by ranks 0, 1; .*rows 0 .* 6 .* 7 ",
          _overlapping, PLAIN),
    Fault("bias not synced", "replicas-agree",
          _UNSYNCED, unsynced(lambda name: name.endswith("bias")), SGD.but(architecture="encoder")),
    Fault("only the first replica synced", "replicas-agree", "step 1, rank 2: the gradient differs",
          unsynced(first=2), SGD.but(world=3)),
    # 11 rows in batches of 3: the last batch has as many rows as there are replicas.
    Fault("fallback at n = replicas", "replicas-agree", "step 4, rank 1: the optimizer differs",
          _idle(1, lambda rows, world: rows <= world), SGD.but(batch_size=3)),
    Fault("fallback trains nothing", "update-law", r"step 3: .* of length (\S+), seen a step that ends \1 away",
          _idle(0), SGD),
    Fault("replicas with tenfold rate", "replicas-agree", "step 1, rank 1: the weights differ",
          around_each("set_rate", lambda inner, rate: inner(10 * rate), first=1), SGD),
    Fault("grad_norm is always 0", "norm-law", r"step 1: the reported norm .*seen 0; ratio 0\.000",
          with_result(lambda result: replace(result, grad_norm=0.0)), SGD),
)  # fmt: skip


# caught by them


def _an_ulp_off(replica: Replica) -> None:
    def set_gradient(inner: Any, pieces: Any, divisor: int) -> None:
        inner(pieces, divisor)
        replica.master.gradient.view(torch.int32)[replica.master.gradient.abs().argmax()] ^= 1

    around(replica, "set_gradient", set_gradient)


CAUGHT = (
    Fault("LoRA B not synced", "replicas-agree", _UNSYNCED, unsynced(lambda name: "lora_B" in name), SGD),
    Fault("head weight not synced", "replicas-agree",
          _UNSYNCED, unsynced(lambda name: "modules_to_save" in name), SGD),
    Fault("sync off by an ulp", "replicas-agree", _UNSYNCED, on_replicas(_an_ulp_off, first=1), SGD),
)  # fmt: skip


# to be added by a suite for data parallelism


def _unweighted(parts: TrainerUnderTest, _: ExitStack) -> None:
    batch, world = current_batch(parts), parts.backend.world_size
    for replica in parts.replicas:
        scaled_partials(replica, lambda partial: len(batch().ids) / (world * max(rows_of(partial), 1)))


def _clipped_by_shard(replica: Replica) -> None:
    def factor(partial: PartialGradient) -> float:
        norm = float(local_sum(replica, partial).norm()) / max(rows_of(partial), 1)
        return min(1.0, _LIMIT / (norm + 1e-6))

    scaled_partials(replica, factor)


def _nan_masked(parts: TrainerUnderTest, _: ExitStack) -> None:
    def loss_sum(inner: Callable[..., LeafLoss], model: nn.Module, batch: Any) -> LeafLoss:
        loss = inner(model, batch)
        if torch.isfinite(loss.loss_sum):
            return loss
        nothing = sum((p.sum() * 0.0 for p in model.parameters() if p.requires_grad), torch.zeros(()))
        return replace(loss, loss_sum=nothing)

    around(parts.task, "loss_sum", loss_sum)


def _shard_ignored(parts: TrainerUnderTest, stack: ExitStack) -> None:
    batch = current_batch(parts)

    def gradients(inner: Callable[..., PartialGradient], step: int, leaves: Any, *args: Any, **named: Any) -> Any:
        first = batch().micro_batches(parts.case.micro_batches)
        other = [replace(leaf, ids=first[place]) for place, leaf in enumerate(leaves)]
        return inner(step, other, *args, **named)

    around_each("gradients", gradients, first=1)(parts, stack)


def _detached(replica: Replica) -> None:
    for name, module in replica.model.named_modules():
        if name.endswith("lora_B.default"):
            module.register_forward_hook(lambda module, given, output: output.detach())


def _loss_after_step(parts: TrainerUnderTest, _: ExitStack) -> None:
    def change(batch: GlobalBatch, result: StepResult) -> StepResult:
        task, model = parts.task.inner, parts.replicas[0].model
        with torch.no_grad():
            loss = task.loss_sum(model, task.load(batch.ids, parts.replicas[0].device)).loss_sum
        return replace(result, loss=float(loss) / len(batch.ids))

    around_updates(parts, lambda batch: None, change)


_LIMIT = 0.2
_POISONED = SGD.but(poison=Poison(2, 3, "nan"))
ADDED = (
    Fault("unweighted mean of uneven shards", "gradient-law",
          r"step 3: .*ratio 0\.500 = 1 / world 2", _unweighted, SGD),
    Fault("clipped by shard", "gradient-law", r"step 1: 8 of 15 tensors .*score\.weight 0\.90",
          on_replicas(_clipped_by_shard), SGD.but(clip_norm=_LIMIT)),
    Fault("NaN masked", "halt-together", "step 2: a planted fault left no violation", _nan_masked, _POISONED),
    Fault("moments not synced", "replicas-agree", "step 1, rank 1: the optimizer differs",
          after_updates(lambda own: own.optimizer_state()["exp_avg"].mul_(1.5), first=1), ADAMW),
    Fault("stale fallback", "replicas-agree", "step 3, rank 1: the optimizer differs", _idle(1), SGD),
    Fault("double step", "update-law", r"step 1: .* of length (\S+), seen a step that ends \1 away",
          around_each("apply", lambda inner: (inner(), inner())), SGD),
    Fault("sum instead of mean", "gradient-law", r"step 1: .*ratio 5\.000 = batch 5",
          around_each("set_gradient", lambda inner, pieces, divisor: inner(pieces, 1)), SGD),
    Fault("rank ignores its shard", "samples-once",
          "step 1: rows used more than once, by ranks 0, 1; .*rows 0 .* 2 .* 3 ",
          _shard_ignored, PLAIN),
    Fault("LoRA detached from the graph", "gradient-law", "step 1: 7 of 15 tensors .*lora_B",
          on_replicas(_detached), SGD),
    Fault("loss computed after the step", "losses-close",
          r"step 1: .* at 3 of 3 updates; .*seen 0\.97", _loss_after_step, PLAIN),
)  # fmt: skip
