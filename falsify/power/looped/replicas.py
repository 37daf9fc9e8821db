"""Faults that let the ranks part: of section A of the catalogue, and of one rank's hardware (K)."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from andon_falsify.loops.task import optimizer
from andon_falsify.peers.plain import PlainLoop
from andon_falsify.subjects.case import Case

from .fault import ADAMW, Inside, LoopFault, Outside, Timed
from .right import Averaged, Tracking, Wrapped


class OwnStart(PlainLoop):
    """The adapter is drawn by the rank's own seed, and nothing is broadcast."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        if dist.get_rank():
            drawn = torch.Generator(self.trained[0].device).manual_seed(case.seed + dist.get_rank())
            nn.init.normal_(self.trained[0], std=0.1, generator=drawn)


class FollowingOnOne(Averaged):
    """The average of the weights is kept up on rank 0 only, and the others keep theirs."""

    def _follow(self) -> None:
        if dist.get_rank() == 0:
            super()._follow()


class Unreduced(PlainLoop):
    """Nothing is reduced."""

    def _add_over_ranks(self, total: Tensor) -> None:
        dist.all_reduce(total)


class Bypassed(Wrapped):
    """Forward passes go through `ddp.module`."""

    def _wrapped(self) -> nn.Module:
        super()._wrapped()
        inner: nn.Module = self.ddp.module
        return inner


class AdaptersAlone(Wrapped):
    """The adapters are wrapped, and the model that holds them is called."""

    def _wrapped(self) -> nn.Module:
        layers = [module for name, module in self.model.named_modules() if name.endswith(("lora_A", "lora_B"))]
        self.ddp = DistributedDataParallel(nn.ModuleList(layers))
        return self.model


class AdapterAfterwards(Wrapped):
    """The adapters are put in when the model is wrapped already."""

    def _wrapped(self) -> nn.Module:
        holders = [module for name, module in self.model.named_modules() if name.endswith(("lora_A", "lora_B"))]
        adapters = [holder._modules.pop("default") for holder in holders]
        ddp = super()._wrapped()
        for holder, adapter in zip(holders, adapters, strict=True):
            holder._modules["default"] = adapter
        return ddp


class CastAfterwards(Wrapped):
    """The model is cast when it is wrapped already."""

    def _wrapped(self) -> nn.Module:
        ddp = super()._wrapped()
        self.model.double()
        return ddp


class ReplacedAfterwards(Wrapped):
    """The head is made anew when the model is wrapped already, and the optimizer after it."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        renew_head(self)
        self.optimizer = optimizer(case, self.trained)

    def _wrapped(self) -> nn.Module:
        self.ddp = DistributedDataParallel(self.model, find_unused_parameters=True)
        return self.ddp


class AddedWhileTraining(Timed):
    """A module is put into the model in the middle of the run."""

    at = 3

    def _update(self, batch: list[int]) -> Tensor:
        if self.due:
            self.model.injected = nn.Linear(2, 2)
        return super()._update(batch)


class ReplacedWhileTraining(Timed):
    """The head is made anew in the middle of the run, and the optimizer has the old one."""

    at = 3

    def _update(self, batch: list[int]) -> Tensor:
        if self.due:
            renew_head(self)
        return super()._update(batch)


class LastAlone(PlainLoop):
    """Only the gradient of the last micro-batch is reduced; the earlier ones are added behind it."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.earlier: list[tuple[nn.Parameter, Tensor]] = []

    def _update(self, batch: list[int]) -> Tensor:
        self.earlier.clear()
        return super()._update(batch)

    def _loss_sum(self, ids: object) -> Tensor:
        for parameter in self.trained:
            if parameter.grad is not None:
                self.earlier.append((parameter, parameter.grad))
                parameter.grad = None
        return super()._loss_sum(ids)  # type: ignore[arg-type]

    def _add_over_ranks(self, total: Tensor) -> None:
        super()._add_over_ranks(total)
        for parameter, gradient in self.earlier:
            assert parameter.grad is not None
            parameter.grad += gradient


class Unshared(Tracking):
    """Every rank keeps its own running statistics."""

    def _share(self) -> None:
        pass


class MomentAstray(Timed):
    """One moment of rank 1's optimizer is another after an update."""

    def _apply(self) -> None:
        super()._apply()
        if dist.get_rank() == 1 and self.due:
            self.optimizer.state[self.trained[0]]["exp_avg"].view(-1)[0] += 1


class OwnRate(Timed):
    """Rank 1 lowers its rate, by a metric of its own."""

    at = 3

    def _apply(self) -> None:
        if dist.get_rank() == 1 and self.due:
            self.optimizer.param_groups[0]["lr"] *= 0.1
        super()._apply()


class BitFlipped(Timed):
    """One weight of rank 1 is another between two updates."""

    at = 3

    def _update(self, batch: list[int]) -> Tensor:
        if dist.get_rank() == 1 and self.due:
            self._flip(self.trained[0].detach().view(-1))
        return super()._update(batch)

    def _flip(self, weights: Tensor) -> None:
        weights[0] *= 1 + 2.0**-10


class FlippedUnseen(BitFlipped):
    """The same below torch, as hardware does it: no version counter moves."""

    def _flip(self, weights: Tensor) -> None:
        weights.data.view(torch.int32)[0] ^= 1 << 12


class SpoiltBehind(Timed):
    """One element of rank 1's gradient is another behind the reduction of an update."""

    def _add_over_ranks(self, total: Tensor) -> None:
        super()._add_over_ranks(total)
        gradient = self.trained[-1].grad
        if dist.get_rank() == 1 and self.due and gradient is not None:
            gradient.view(-1)[0] += 0.5


class RoundedOtherwise(Timed):
    """The optimizer of rank 1 rounds one weight the other way, from one update on."""

    at = 1

    def _apply(self) -> None:
        super()._apply()
        if dist.get_rank() == 1 and self.done + 1 >= self.at:
            weight = self.trained[-1].detach().view(-1)
            weight[0] = torch.nextafter(weight[0], torch.tensor(torch.inf))


def renew_head(loop: PlainLoop) -> None:
    """Put a new parameter of the same values in the place of the head's."""
    inner = loop.model.module if isinstance(loop.model, DistributedDataParallel) else loop.model
    names = {id(parameter): name for name, parameter in inner.named_parameters()}
    place, _, name = names[id(loop.trained[-1])].rpartition(".")
    new = nn.Parameter(loop.trained[-1].detach().clone())
    setattr(inner.get_submodule(place), name, new)
    loop.trained[-1] = new


_CLAIM, _SAME, _REDUCED = "replicas-agree", "replicas-agree", Inside("gradients-agree", 1)
_GRADIENT = Outside(_CLAIM, r"step 1, rank 1: the gradient differs")
FAULTS = (
    LoopFault("F01", "initial weights differ", OwnStart, Inside(_SAME, 0),
              Outside(_CLAIM, "before step 1, rank 1: the initial weights differ")),
    # Nobody is seen to reduce: weights that part are suspected at once, and certain at the close.
    LoopFault("F02", "nothing reduced", Unreduced, Inside(_SAME, 1), _GRADIENT),
    LoopFault("F02", "DDP bypassed through its module", Bypassed, _REDUCED, _GRADIENT),
    LoopFault("F04", "adapters outside the wrapper", AdaptersAlone, _REDUCED, _GRADIENT),
    LoopFault("F05", "adapters put in after wrapping", AdapterAfterwards, _REDUCED, _GRADIENT),
    LoopFault("F05", "module put in while training", AddedWhileTraining, Inside("parameters-kept", 3),
              Outside("gradient-law", r"step 3: injected\.\w+ has another layout")),
    LoopFault("F07", "cast after wrapping", CastAfterwards, _REDUCED, _GRADIENT),
    LoopFault("F08", "parameter replaced after wrapping", ReplacedAfterwards, _REDUCED, _GRADIENT),
    LoopFault("F08", "parameter replaced while training", ReplacedWhileTraining, Inside("parameters-kept", 3),
              Outside("gradient-law", r"step 4: 1 of 15 tensors are off the law.*score\.weight")),
    LoopFault("F10", "only the last micro-batch reduced", LastAlone, _REDUCED, _GRADIENT),
    LoopFault("F11", "buffers not synchronised", Unshared, Inside("buffers-agree", 1),
              Outside(_CLAIM, "before step 2, rank 1: running statistics differ")),
    LoopFault("F13", "moment of one rank astray", MomentAstray, Inside("optimizers-agree", 4, at=3),
              Outside(_CLAIM, "step 2, rank 1: the optimizer differs", ADAMW)),
    LoopFault("F14", "rank-local learning rate", OwnRate, Inside("hyperparameters-agree", 5, at=5),
              Outside("schedule", "step 3, rank 1: another learning rate")),
    LoopFault("F89", "bit flip in a weight", BitFlipped, Inside(_SAME, 4, at=4),
              Outside(_CLAIM, "step 2, rank 1: the weights differ")),
    LoopFault("F89", "bit flip below torch", FlippedUnseen, Inside(_SAME, 4, at=4),
              Outside(_CLAIM, "step 2, rank 1: the weights differ")),
    LoopFault("F91", "corruption after the reduction", SpoiltBehind, Inside("gradients-agree", 4, at=4),
              Outside(_CLAIM, "step 2, rank 1: the gradient differs")),
    LoopFault("F92", "one rank rounds otherwise", RoundedOtherwise, Inside(_SAME, 4, at=3),
              Outside(_CLAIM, "step 1, rank 1: the weights differ")),
    LoopFault("F89", "average of weights kept up on one rank", FollowingOnOne, Inside("copies-agree", 2),
              "what stands beside the model is no part of what a loop shows"),
)  # fmt: skip
