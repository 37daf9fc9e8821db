"""Faults against the promises of Andon's trainer, one for each claim. tests/inspection has those of `heads-quoted`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from andon.model.adapter import trainable_parameters
from andon.step.micro_batch import LeafLoss
from andon.step.plan import BatchPlan
from andon.step.replica import Replica
from andon.step.step import TrainingStep
from andon_contracts.record import LedgerFile, Record, Step, chain, encode
from andon_falsify.compliance.cases import BIG, MOMENTUM, PLAIN, SGD
from andon_falsify.subjects.assembly import TrainerUnderTest

from .planting import (
    Fault,
    Plant,
    after_updates,
    around,
    around_each,
    on_replicas,
    patched,
    with_rate,
    with_result,
)


def _masks_by_rank(parts: TrainerUnderTest, _: ExitStack) -> None:
    for rank, replica in parts.by_rank.items():
        replica.seed += rank


def _sum_by_rank(parts: TrainerUnderTest, _: ExitStack) -> None:
    def finish(inner: Any, received: Any) -> torch.Tensor:
        rows = [row for part in received for row in part]
        total: torch.Tensor = sum(rows[1:], rows[0])
        return total

    around(parts.step._reduce, "finish", finish)


def _order_by_world(parts: TrainerUnderTest, _: ExitStack) -> None:
    parts.plan = replace(parts.plan, seed=parts.plan.seed + parts.backend.world_size)


def _last_batch_dropped(parts: TrainerUnderTest, _: ExitStack) -> None:
    plan = parts.plan
    parts.plan = BatchPlan(plan.ids, plan.batch_size, plan.micro_batches, plan.seed, 1, plan.total_steps - 1)


def _rate_by_micro_batch(parts: TrainerUnderTest, step: int) -> int:
    return min(parts.plan.total_steps, (step - 1) * parts.case.micro_batches + 1)


def _layout_reversed(parts: TrainerUnderTest, _: ExitStack) -> None:
    case = parts.case
    for place, rank in enumerate(parts.backend.ranks):
        if rank:
            own = parts.replicas[place]
            backwards = dict(reversed(trainable_parameters(own.model).items()))
            master_on = own.master.device if own.master.separate else None
            parts.replicas[place] = Replica(own.model, backwards, own.settings, case.seed, own.device, master_on)
    parts.step = TrainingStep(
        parts.backend, parts.replicas, parts.task, case.micro_batches, case.clip_norm, late=parts.step.late
    )


def _base_touched(replica: Replica) -> None:
    next(iter(replica.frozen().values())).view(-1)[0] += 1e-3


def _line_lost(parts: TrainerUnderTest, stack: ExitStack) -> None:
    """The writer itself loses a line. (The file's size would show that another program removed one.)"""
    append = LedgerFile.append

    def losing(self: LedgerFile, record: Record) -> None:
        if isinstance(record, Step) and record.step == 2:
            self._count, self._digest = self._count + 1, chain(encode(record, self._count, self._digest))
        else:
            append(self, record)

    patched(stack, LedgerFile, "append", losing)


def _moments_lost(inner: Any, weights: Any, state: Any, updates: int) -> None:
    inner(weights, {n: v if n == "step" else torch.zeros_like(v) for n, v in state.items()}, updates)


# memory that is kept without need


def _every_leaf_kept(replica: Replica) -> None:
    kept: list[torch.Tensor] = []

    def leaf(inner: Callable[..., Any], *args: Any, **named: Any) -> Any:
        report = inner(*args, **named)
        kept.append(replica.parameters.gradient.clone())
        return report

    around(replica, "_leaf", leaf)
    _cleared_by_updates(replica, kept)


def _cleared_by_updates(replica: Replica, kept: list[torch.Tensor]) -> None:
    def gradients(inner: Callable[..., Any], *args: Any, **named: Any) -> Any:
        kept.clear()
        return inner(*args, **named)

    around(replica, "gradients", gradients)


def _graph_kept(parts: TrainerUnderTest, stack: ExitStack) -> None:
    backward = torch.Tensor.backward

    def keeping(self: torch.Tensor, *args: Any, **named: Any) -> None:
        backward(self, *args, **{**named, "retain_graph": True})  # type: ignore[no-untyped-call]

    patched(stack, torch.Tensor, "backward", keeping)
    kept: dict[int, list[torch.Tensor]] = {id(replica.model): [] for replica in parts.replicas}

    def loss_sum(inner: Callable[..., LeafLoss], model: nn.Module, batch: Any) -> LeafLoss:
        loss = inner(model, batch)
        kept[id(model)].append(loss.loss_sum)
        return loss

    around(parts.task, "loss_sum", loss_sum)
    for replica in parts.replicas:
        _cleared_by_updates(replica, kept[id(replica.model)])


def _kept_after_updates(make: Callable[[Replica], list[torch.Tensor]], *, once: bool = True) -> Plant:
    """After an update, every replica keeps the tensors of `make`. once: of the last update only."""

    def plant(parts: TrainerUnderTest, stack: ExitStack) -> None:
        kept: dict[int, list[torch.Tensor]] = {}

        def keep(own: Replica) -> None:
            held = kept.setdefault(id(own), [])
            if once:
                held.clear()
            held += make(own)

        after_updates(keep)(parts, stack)

    return plant


_double_moments = _kept_after_updates(lambda own: [moment.double() for moment in own.optimizer_state().values()])
_second_base = _kept_after_updates(lambda own: [tensor.clone() for tensor in own.frozen().values()])
_growth = _kept_after_updates(lambda own: [own.parameters.gradient[:64].clone()], once=False)


def _norms_decay(parts: TrainerUnderTest, _: ExitStack) -> None:
    for replica in parts.replicas:
        for group in replica.optimizer.param_groups:
            group["weight_decay"] = parts.case.weight_decay


FAULTS = (
    Fault("norms are decayed too", "update-law", r"step 1: \S+norm\.weight is not the result of one step of sgd",
          _norms_decay, SGD.but(rank=0, weight_decay=0.5)),
    Fault("masks keyed by rank", "same-everywhere", "step 1, .*the loss differs first", _masks_by_rank, SGD),
    Fault("sum in the order of ranks", "same-everywhere",
          r"step 1, .*the gradient differs first \(loss,", _sum_by_rank, SGD.but(world=3)),
    Fault("order depends on world size", "plan-followed", "step 1: other rows than planned", _order_by_world, SGD),
    Fault("last short batch dropped", "plan-followed",
          "step 3: 1 planned updates were never made", _last_batch_dropped, SGD),
    Fault("rate counted by micro-batch", "schedule",
          "step 2: the learning rate is off .*seen 1e-06", with_rate(_rate_by_micro_batch), SGD),
    Fault("layout reversed on a rank", "layout-equal",
          r"tensor 0, rank 1 .*: the layout differs; .*seen \S+score\.", _layout_reversed, PLAIN),
    Fault("base touched", "base-frozen", r"rank \d: a frozen weight changed",
          after_updates(_base_touched, first=1), SGD),
    Fault("NaN reported as the loss", "loss-finite", "step 2: the loss is not finite",
          with_result(lambda result: replace(result, loss=float("nan")) if result.step == 2 else result), SGD),
    Fault("line of the ledger lost", "chain-intact", "line 3: it or the line before it was changed", _line_lost, SGD),
    Fault("moments lost in a resume", "resume-equal",
          "step 3 of resumed: the weights done again", around_each("restore", _moments_lost), MOMENTUM, "resume"),
    Fault("schedule started over in a resume", "resume-equal",
          "step 3 of resumed: the learning rate done again",
          with_rate(lambda parts, step: max(1, step - parts.seen.resumed_from)), MOMENTUM, "resume"),
)  # fmt: skip
MEMORY = (
    Fault("every leaf's gradient kept", "memory-budget", r"the peak is 1\.4", on_replicas(_every_leaf_kept), BIG),
    Fault("graphs retained", "memory-budget", r"the peak is 1\.3", _graph_kept, BIG),
    Fault("moments in fp64", "memory-budget", r"the peak is 1\.2", _double_moments, BIG),
    Fault("second copy of the base", "memory-budget", r"the peak is 1\.1", _second_base, BIG),
    Fault("growth with every step", "memory-budget", "the bytes alive between updates rise", _growth, BIG),
)  # fmt: skip
