"""The mutants that a suite of data parallelism must add to the seed's (seed 5.1, "Add")."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from andon.gradients import average_gradients
from andon.step.plan import GlobalBatch
from andon.step.replica import PartialGradient
from andon.step.step import StepResult
from andon.step.task import LeafLoss
from andon_falsify.faults.planting import (
    ADAMW,
    PLAIN,
    SGD,
    Fault,
    around,
    around_updates,
    body_replaced,
    current_batch,
    followers,
    local_sum,
    rows_of,
    scaled_partials,
)
from andon_falsify.faults.survivors import idle
from andon_falsify.subjects.assembly import Parts
from andon_falsify.subjects.case import Poison


def _unweighted(parts: Parts, _: ExitStack) -> None:
    batch = current_batch(parts)

    def factor(partial: PartialGradient) -> float:
        return len(batch().ids) / (parts.backend.world_size * max(rows_of(partial), 1))

    for replica in parts.replicas:
        scaled_partials(replica, factor)


def _clipped_by_shard(parts: Parts, _: ExitStack) -> None:
    limit = parts.case.clip_norm
    assert limit is not None
    for replica in parts.replicas:

        def factor(partial: PartialGradient, own: Any = replica) -> float:
            norm = float(local_sum(own, partial).norm()) / max(rows_of(partial), 1)
            return min(1.0, limit / (norm + 1e-6))

        scaled_partials(replica, factor)


def _nan_masked(parts: Parts, _: ExitStack) -> None:
    def loss_sum(inner: Callable[..., LeafLoss], model: nn.Module, batch: Any) -> LeafLoss:
        loss = inner(model, batch)
        if torch.isfinite(loss.loss_sum):
            return loss
        nothing = sum((p.sum() * 0.0 for p in model.parameters() if p.requires_grad), torch.zeros(()))
        return replace(loss, loss_sum=nothing)

    around(parts.task, "loss_sum", loss_sum)


def _own_moments(parts: Parts, _: ExitStack) -> None:
    for replica in followers(parts).values():

        def apply(inner: Callable[[], None], own: Any = replica) -> None:
            inner()
            own.optimizer_state()["exp_avg"].mul_(1.5)

        around(replica, "apply", apply)


def _stale_fallback(parts: Parts, _: ExitStack) -> None:
    idle(parts, lambda rank: rank > 0, lambda rows, world: rows < world)


def _double_step(parts: Parts, _: ExitStack) -> None:
    def apply(inner: Callable[[], None]) -> None:
        inner()
        inner()

    for replica in parts.replicas:
        around(replica, "apply", apply)


def _sum_not_mean(parts: Parts, _: ExitStack) -> None:
    for replica in parts.replicas:
        around(replica, "set_gradient", lambda inner, pieces, divisor: inner(pieces, 1))


def _shard_ignored(parts: Parts, _: ExitStack) -> None:
    batch = current_batch(parts)

    def gradients(inner: Callable[..., PartialGradient], step: int, leaves: Any, *args: Any, **named: Any) -> Any:
        first = batch().micro_batches(parts.case.micro_batches)
        other = [replace(leaf, ids=first[place]) for place, leaf in enumerate(leaves)]
        return inner(step, other, *args, **named)

    for replica in followers(parts).values():
        around(replica, "gradients", gradients)


def _detached(parts: Parts, _: ExitStack) -> None:
    for replica in parts.replicas:
        for name, module in replica.model.named_modules():
            if name.endswith("lora_B.default"):
                module.register_forward_hook(lambda module, given, output: output.detach())


def _loss_after_step(parts: Parts, _: ExitStack) -> None:
    def change(batch: GlobalBatch, result: StepResult) -> StepResult:
        task, model = parts.task.inner, parts.replicas[0].model
        with torch.no_grad():
            loss = task.loss_sum(model, task.load(batch.ids, parts.replicas[0].device)).loss_sum
        return replace(result, loss=float(loss) / len(batch.ids))

    around_updates(parts, lambda batch: None, change)


def _sum_in_fp32(grads: Any) -> Any:
    total = torch.tensor(grads[0], dtype=torch.float32)
    for gradient in grads[1:]:
        total = total + torch.tensor(gradient, dtype=torch.float32)
    return (total / len(grads)).tolist()


def _overflow(_: object, stack: ExitStack) -> None:
    body_replaced(stack, average_gradients, _sum_in_fp32)


_SOURCE = "seed 5.1, add"
_POISONED = SGD.but(poison=Poison(2, 3, "nan"))
FAULTS = (
    Fault("unweighted mean of uneven shards", _SOURCE, "gradient-law", _unweighted, SGD),
    Fault("clipped by shard", _SOURCE, "gradient-law", _clipped_by_shard, SGD.but(clip_norm=0.2)),
    Fault("NaN masked", _SOURCE, "halt-together", _nan_masked, _POISONED),
    Fault("moments not synced", _SOURCE, "replicas-agree", _own_moments, ADAMW),
    Fault("stale fallback", _SOURCE, "replicas-agree", _stale_fallback, SGD),
    Fault("double step", _SOURCE, "update-law", _double_step, SGD),
    Fault("sum instead of mean", _SOURCE, "gradient-law", _sum_not_mean, SGD),
    Fault("rank ignores its shard", _SOURCE, "samples-once", _shard_ignored, PLAIN),
    Fault("LoRA detached from the graph", _SOURCE, "gradient-law", _detached, SGD),
    Fault("loss computed after the step", _SOURCE, "losses-close", _loss_after_step, PLAIN),
    Fault("fp32 overflow in the average", _SOURCE, "average-law", _overflow, kind="functions"),
)
