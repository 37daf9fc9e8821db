"""Faults that are planted on one replica between two updates, and what is then seen on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from andon.backend.base import Backend
from andon.step.micro_batch import Batch, LeafLoss, Task
from andon.step.plan import GlobalBatch
from andon.step.replica import Replica
from andon.step.step import TrainingStep
from andon_contracts.violation import Violation
from tests.support.toy import Settings, ToyTask, build, rate

CULPRIT = 1
WORLD = 3
SETTINGS = Settings(8, sizes=(10, 10, 10), clip_norm=0.2)


@dataclass(frozen=True)
class Fault:
    """A fault and what must be said of it. `early`: found before the update, so nothing may have been applied."""

    plant: Callable[[Replica], None]
    clause: str
    tensor: str
    early: bool = True


def _wrap(replica: Replica, method: str, around: Callable[..., Any]) -> None:
    original = getattr(replica, method)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(replica, method, wrapped)


def _flip_weight(replica: Replica) -> None:
    weight = replica.parameters.weight_views()["first.bias"]
    weight.view(torch.int32)[4] ^= 1


def _flip_moment(replica: Replica) -> None:
    replica.optimizer_state()["exp_avg_sq"].view(torch.int32)[3] ^= 1 << 20


def _flip_reduced_gradient(replica: Replica) -> None:
    def around(set_gradient: Callable[..., None], *args: Any) -> None:
        set_gradient(*args)
        replica.parameters.views(replica.parameters.gradient)["second.weight"].view(torch.int32)[1, 1] ^= 1

    _wrap(replica, "set_gradient", around)


def _other_rows(replica: Replica) -> None:
    def around(gradients: Callable[..., Any], step: int, leaves: Any, roots: Any, task: Task, *, checked: bool) -> Any:
        return gradients(step, leaves, roots, OtherRows(task), checked=checked)

    _wrap(replica, "gradients", around)


def _roots(change: Callable[[list[Any]], list[Any]]) -> Callable[[Replica], None]:

    def plant(replica: Replica) -> None:
        def around(gradients: Callable[..., Any], step: int, leaves: Any, roots: Any, *rest: Any, checked: bool) -> Any:
            return gradients(step, leaves, change(list(roots)), *rest, checked=checked)

        _wrap(replica, "gradients", around)

    return plant


def _double_rate(replica: Replica) -> None:
    _wrap(replica, "set_rate", lambda set_rate, rate: set_rate(2 * rate))


def _clip_twice(replica: Replica) -> None:
    def around(clip: Callable[..., Any], limit: float, norm: float) -> Any:
        clip(limit, norm)
        return clip(limit, norm)

    _wrap(replica, "clip", around)


def _no_clip(replica: Replica) -> None:
    _wrap(replica, "clip", lambda clip, limit, norm: clip(None, norm))


def _second_update(replica: Replica) -> None:
    def around(apply: Callable[[], None]) -> None:
        apply()
        apply()

    _wrap(replica, "apply", around)


def _no_update(replica: Replica) -> None:
    _wrap(replica, "apply", lambda apply: None)


FAULTS: Mapping[str, Fault] = {
    "weight flipped": Fault(_flip_weight, "replicas-agree", "first.bias"),
    "moment flipped": Fault(_flip_moment, "optimizers-agree", "exp_avg_sq", early=False),
    "reduced gradient flipped": Fault(_flip_reduced_gradient, "gradients-agree", "second.weight"),
    "other rows": Fault(_other_rows, "content-planned", "micro-batch 3"),
    "micro-batch computed twice": Fault(_roots(lambda roots: [*roots, roots[-1]]), "samples-once", ""),
    "micro-batch skipped": Fault(_roots(lambda roots: roots[:-1]), "samples-once", ""),
    "micro-batches out of order": Fault(_roots(lambda roots: roots[::-1]), "samples-once", ""),
    "rate doubled": Fault(_double_rate, "learning-rate-planned", "learning rate"),
    "clipped twice": Fault(_clip_twice, "clip-once", "clipped gradient"),
    "not clipped": Fault(_no_clip, "clip-once", "clipped gradient"),
    "second update": Fault(_second_update, "one-update", "count of updates", early=False),
    "no update": Fault(_no_update, "one-update", "count of updates", early=False),
}
"""By name; `CULPRIT` of `WORLD` ranks has it, and owns micro-batches 3, 4 and 5 of 8."""


class OtherRows:
    def __init__(self, task: Task) -> None:
        self._task = task
        self.loss_sum = task.loss_sum
        self.content = task.content
        self.planned_content = task.planned_content
        self.planned_terms = task.planned_terms

    def load(self, ids: Sequence[int], device: torch.device) -> Batch:
        return self._task.load([(row + 1) % 30 for row in ids], device)


class PoisonedTask(ToyTask):
    """A toy task in which one row makes the loss, or only the gradient, of its micro-batch NaN."""

    def __init__(self, row: int, where: str) -> None:
        super().__init__()
        self.row = row
        self.where = where

    def loss_sum(self, model: nn.Module, batch: Batch) -> LeafLoss:
        found = super().loss_sum(model, batch)
        if self.row not in batch["id"].tolist():
            return found
        if self.where == "loss":
            return LeafLoss(found.loss_sum + torch.tensor(float("nan")), found.correct)
        # The root of 0 is 0, its slope infinite: a finite loss with a NaN in the gradient of what is under it.
        bias = model.get_parameter("second.bias")
        return LeafLoss(found.loss_sum + (0 * bias.sum()).sqrt(), found.correct)


class SteepTask(ToyTask):
    """The toy loss with a gradient that is `scale` times as steep; the loss itself is the same."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def loss_sum(self, model: nn.Module, batch: Batch) -> LeafLoss:
        found = super().loss_sum(model, batch)
        value = found.loss_sum.detach()
        return LeafLoss(value + self.scale * (found.loss_sum - value), found.correct)


def cannot_read(*_: object) -> Any:
    raise OSError("the rows cannot be read")


@dataclass(frozen=True)
class Caught:
    """What one process saw: the violation's parts, and whether any local replica was changed by the update."""

    clause: str
    step: int
    ranks: tuple[int, ...]
    tensor: str
    message: str
    applied: bool


Drive = Callable[[TrainingStep, GlobalBatch], object]


def ordinary(step: TrainingStep, batch: GlobalBatch) -> object:
    return step(batch, rate(batch.step), batch.step)


def catch(
    backend: Backend, plant: Callable[[Replica], None], drive: Drive = ordinary, settings: Settings = SETTINGS
) -> Caught:
    """One good update, then the fault on `CULPRIT`, then the update that must not pass."""
    step, replicas = build(backend, settings)
    step.attest_start({})
    first, second = settings.batches()[:2]
    ordinary(step, first)
    for rank, replica in zip(backend.ranks, replicas, strict=True):
        if rank == CULPRIT:
            plant(replica)
    return violation_of(lambda: drive(step, second), replicas)


def violation_of(work: Callable[[], object], replicas: Sequence[Replica]) -> Caught:
    """The violation that `work` raises, and whether it moved a replica; `AssertionError` where it raises none."""
    before = [(r.weights_digest(), r.optimizer_digest(), r.updates) for r in replicas]
    try:
        work()
    except Violation as violation:
        after = [(r.weights_digest(), r.optimizer_digest(), r.updates) for r in replicas]
        finding = violation.finding
        return Caught(violation.clause, finding.step, finding.ranks, finding.tensor, str(violation), before != after)
    raise AssertionError("nothing was raised")
