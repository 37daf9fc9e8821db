"""Faults of the schedule and the parameter groups (section G of the catalogue), and of which parameters train (H)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from andon_falsify.loops.task import optimizer
from andon_falsify.peers.plain import PlainLoop

from .fault import ADAMW, WATCHED, Inside, LoopFault, Outside, changed, disturbed
from .replicas import renew_head
from .right import Grouped, Scheduled, Tied


def _head_frozen(loop: PlainLoop) -> None:
    loop.trained.pop().requires_grad_(False)
    loop.optimizer = optimizer(loop.case, loop.trained)


def _head_not_decaying(loop: PlainLoop) -> None:
    last = loop.optimizer.param_groups[0]["params"].pop()
    loop.optimizer.add_param_group({"params": [last], "weight_decay": 0.0})


def _adapter_detached(loop: PlainLoop) -> None:
    def detached(_: nn.Module, __: Any, out: Tensor) -> Tensor:
        return out.detach()

    for name, module in loop.model.named_modules():
        if name.endswith("lora_B"):
            module.get_submodule("default").register_forward_hook(detached)


def _reduced_if_any(loop: PlainLoop, _: object, total: Tensor) -> None:
    for parameter in loop.trained:
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
    dist.all_reduce(total)


def _base_trained(loop: PlainLoop) -> None:
    loop.trained = list(loop.model.requires_grad_(True).parameters())
    loop.optimizer = optimizer(loop.case, loop.trained)


@torch.no_grad()
def _base_touched(loop: PlainLoop, apply: Callable[[], None]) -> None:
    """A frozen weight changes on every rank, without the optimizer."""
    apply()
    next(p for p in loop.model.parameters() if not p.requires_grad).view(-1)[0] += 1e-3


def _untied(loop: Tied) -> None:
    """A wrapper of the model has copied a weight that two layers share."""
    place, _, name = loop.tied[1].rpartition(".")
    layer = loop.model.get_submodule(place)
    setattr(layer, name, nn.Parameter(layer.get_parameter(name).detach().clone()))
    loop.trained = [parameter for parameter in loop.model.parameters() if parameter.requires_grad]
    loop.optimizer = optimizer(loop.case, loop.trained)


_ALL = WATCHED.but(rank=0, lr=1e-3)
_GROUPS, _DECLARED = Inside("groups-planned", 1, ("groups",)), Inside("parameters-kept", 0, ("trainable",))
FAULTS = (
    LoopFault("F61", "scheduler for each micro-batch",
              changed(Scheduled, _counted=lambda loop, _: loop.done * loop.case.accumulation + 1),
              Inside("learning-rate-planned", 2, ("schedule",)),
              Outside("schedule", "step 2: the learning rate is off the schedule: it is that of step 3")),
    LoopFault("F62", "optimizer holds stale parameters", changed(made=renew_head), Inside("parameters-kept", 0),
              Outside("update-law", "1 tensors that train are in no group of the optimizer")),
    LoopFault("F64", "head frozen", changed(made=_head_frozen), _DECLARED,
              Outside("gradient-law", r"1 trainable tensors have no gradient.*score")),
    LoopFault("F65", "weight decay on norms", changed(Grouped, _decays=lambda loop, _, name: "LayerNorm" not in name),
              Inside("groups-planned", 1, ("groups",), _ALL),
              Outside("update-law", r"step 1: \d+ tensors do not decay as the loop declares",
                      ADAMW.but(rank=0, lr=1e-3))),
    LoopFault("F65", "one matrix does not decay", changed(made=_head_not_decaying), _GROUPS,
              Outside("update-law", r"step 1: 1 matrices do not decay.*score", ADAMW)),
    LoopFault("F65", "other betas", changed(made=lambda loop: loop.optimizer.param_groups[0].update(betas=(0.9, 0.95))),
              _GROUPS, Outside("update-law", "step 1: betas is not torch's default", ADAMW)),
    LoopFault("F65", "other eps", changed(made=lambda loop: loop.optimizer.param_groups[0].update(eps=1e-3)), _GROUPS,
              Outside("update-law", r"step 1: eps is not .* expected 1e-08, seen 0\.001", ADAMW)),
    LoopFault("F67", "adapter gets no gradient", changed(made=_adapter_detached, _add_over_ranks=_reduced_if_any),
              Inside("gradient-present", 1), Outside("gradient-law", r"lora_B\.weight 1,")),
    LoopFault("F68", "base trained", changed(made=_base_trained), _DECLARED,
              Outside("base-frozen", r"\d+ frozen tensors of the model are trained")),
    LoopFault("F68", "base touched", changed(_apply=_base_touched), Inside("base-frozen", 2),
              Outside("base-frozen", "a frozen weight changed")),
    LoopFault("F71", "tied weights untied", changed(Tied, made=_untied), Inside("parameters-kept", 0, ("tied",)),
              "the loop brings the model, so a run without the tie trains another model, and every claim holds for "
              "that; `andon.watch(tied=...)` and our trainer's own checks see it"),
    LoopFault("F89", "weights of all ranks changed between updates",
              disturbed(lambda loop: loop.trained[0].detach().mul_(1.01), at=3),
              "the change is the same on all ranks, and a watch compares the ranks",
              Outside("update-law", "1 tensors changed outside the optimizer's step")),
)  # fmt: skip
