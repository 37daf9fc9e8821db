"""Faults of schedule, parameter groups and of what trains: sections G and H of the catalogue."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from andon_falsify.loops.task import optimizer
from andon_falsify.peers.plain import PlainLoop
from andon_falsify.subjects.case import Case

from .fault import ADAMW, WATCHED, Inside, LoopFault, Outside, Timed
from .replicas import renew_head
from .right import Grouped, Scheduled, Tied


class RateByMicroBatch(Scheduled):
    """The schedule is advanced with every micro-batch."""

    def _counted(self) -> int:
        return self.done * self.case.accumulation + 1


class StaleHead(PlainLoop):
    """The head is made anew when the optimizer is there already."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        renew_head(self)


class HeadFrozen(PlainLoop):
    """The head does not train."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.trained.pop().requires_grad_(False)
        self.optimizer = optimizer(case, self.trained)


class AllDecay(Grouped):
    """The pattern for what does not decay misses the names of the norms."""

    def _decays(self, name: str) -> bool:
        return "LayerNorm" not in name


class HeadNotDecaying(PlainLoop):
    """One matrix is in a group of its own, which does not decay."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        last = self.optimizer.param_groups[0]["params"].pop()
        self.optimizer.add_param_group({"params": [last], "weight_decay": 0.0})


class OtherBetas(PlainLoop):
    """The second moment forgets faster than the case's optimizer does."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.optimizer.param_groups[0]["betas"] = (0.9, 0.95)


class OtherEps(PlainLoop):
    """What keeps the step from dividing by 0 is a hundred thousand times as large."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.optimizer.param_groups[0]["eps"] = 1e-3


class AdapterDetached(PlainLoop):
    """Nothing flows back through the adapter."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        for name, module in self.model.named_modules():
            if name.endswith("lora_B"):
                module.get_submodule("default").register_forward_hook(_detached)

    def _add_over_ranks(self, total: Tensor) -> None:
        for parameter in self.trained:
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
        dist.all_reduce(total)


def _detached(_: nn.Module, __: Any, out: Tensor) -> Tensor:
    return out.detach()


class BaseTrained(PlainLoop):
    """Nothing is frozen."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.trained = list(self.model.requires_grad_(True).parameters())
        self.optimizer = optimizer(case, self.trained)


class BaseTouched(PlainLoop):
    """A frozen weight changes on every rank, without the optimizer."""

    @torch.no_grad()
    def _apply(self) -> None:
        super()._apply()
        next(p for p in self.model.parameters() if not p.requires_grad).view(-1)[0] += 1e-3


class Rescaled(Timed):
    """Every rank rescales a weight between two updates."""

    at = 3

    def _update(self, batch: list[int]) -> Tensor:
        self.trained[0].detach().mul_(1.01 if self.due else 1.0)
        return super()._update(batch)


class Untied(Tied):
    """What wraps the model has copied a weight that two layers share."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        place, _, name = self.tied[1].rpartition(".")
        layer = self.model.get_submodule(place)
        setattr(layer, name, nn.Parameter(layer.get_parameter(name).detach().clone()))
        self.trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = optimizer(case, self.trained)


_ALL = WATCHED.but(rank=0, lr=1e-3)
_GROUPS, _DECLARED = Inside("groups-planned", 1, ("groups",)), Inside("parameters-kept", 0, ("trainable",))
FAULTS = (
    LoopFault("F61", "scheduler for each micro-batch", RateByMicroBatch,
              Inside("learning-rate-planned", 2, ("schedule",)),
              Outside("schedule", "step 2: the learning rate is off the schedule: it is that of step 3")),
    LoopFault("F62", "optimizer holds stale parameters", StaleHead, Inside("parameters-kept", 0),
              Outside("update-law", "1 tensors that train are in no group of the optimizer")),
    LoopFault("F64", "head frozen", HeadFrozen, _DECLARED,
              Outside("gradient-law", r"1 tensors that are to train have no gradient.*score")),
    LoopFault("F65", "weight decay on norms", AllDecay, Inside("groups-planned", 1, ("groups",), _ALL),
              Outside("update-law", r"step 1: \d+ tensors decay otherwise than the loop declares",
                      ADAMW.but(rank=0, lr=1e-3))),
    LoopFault("F65", "one matrix does not decay", HeadNotDecaying, _GROUPS,
              Outside("update-law", r"step 1: 1 matrices do not decay.*score", ADAMW)),
    LoopFault("F65", "other betas", OtherBetas, _GROUPS,
              Outside("update-law", "step 1: betas otherwise than torch's default", ADAMW)),
    LoopFault("F65", "other eps", OtherEps, _GROUPS,
              Outside("update-law", r"step 1: eps otherwise .* expected 1e-08, seen 0\.001", ADAMW)),
    LoopFault("F67", "adapter gets no gradient", AdapterDetached, Inside("gradient-present", 1),
              Outside("gradient-law", r"lora_B\.weight 1,")),
    LoopFault("F68", "base trained", BaseTrained, _DECLARED,
              Outside("base-frozen", r"\d+ frozen tensors of the model train")),
    LoopFault("F68", "base touched", BaseTouched, Inside("base-frozen", 2),
              Outside("base-frozen", "a frozen weight changed")),
    LoopFault("F71", "tied weights untied", Untied, Inside("parameters-kept", 0, ("tied",)),
              "whether two tensors are tied is a matter of the model that a loop brings, and a run with them untied is "
              "that of another model, of which every claim holds; `andon.watch(tied=...)` and our trainer's own checks "
              "see it"),
    LoopFault("F89", "weights of all ranks changed between updates", Rescaled,
              "it changes alike on all ranks, which a watch holds to each other",
              Outside("update-law", "1 tensors changed behind the optimizer's step")),
)  # fmt: skip
