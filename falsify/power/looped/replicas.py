"""Faults after which ranks differ: section A of the catalogue, and one rank's hardware (K)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from andon_falsify.loops.task import optimizer
from andon_falsify.peers.plain import PlainLoop

from .fault import ADAMW, Inside, LoopFault, Outside, changed, disturbed
from .right import Averaged, Tracking, Wrapped


def _own_start(loop: PlainLoop) -> None:
    """Every rank draws the adapter from its own seed, and nothing is broadcast."""
    if dist.get_rank():
        drawn = torch.Generator(loop.trained[0].device).manual_seed(loop.case.seed + dist.get_rank())
        nn.init.normal_(loop.trained[0], std=0.1, generator=drawn)


def _bypassed(loop: Wrapped, wrapped: Callable[[], nn.Module]) -> nn.Module:
    wrapped()
    inner: nn.Module = loop.ddp.module
    return inner


def _adapters(loop: PlainLoop) -> list[nn.Module]:
    return [module for name, module in loop.model.named_modules() if name.endswith(("lora_A", "lora_B"))]


def _adapters_alone(loop: Wrapped, _: object) -> nn.Module:
    """The adapters are wrapped, and the model that holds them is called."""
    loop.ddp = DistributedDataParallel(nn.ModuleList(_adapters(loop)))
    return loop.model


def _adapter_afterwards(loop: Wrapped, wrapped: Callable[[], nn.Module]) -> nn.Module:
    holders = _adapters(loop)
    adapters = [holder._modules.pop("default") for holder in holders]
    ddp = wrapped()
    for holder, adapter in zip(holders, adapters, strict=True):
        holder._modules["default"] = adapter
    return ddp


def _cast_afterwards(loop: Wrapped, wrapped: Callable[[], nn.Module]) -> nn.Module:
    ddp = wrapped()
    loop.model.double()
    return ddp


def _wrapped_with_unused(loop: Wrapped, _: object) -> nn.Module:
    loop.ddp = DistributedDataParallel(loop.model, find_unused_parameters=True)
    return loop.ddp


def _replaced_afterwards(loop: Wrapped) -> None:
    renew_head(loop)
    loop.optimizer = optimizer(loop.case, loop.trained)


def _last_alone(loop: Any, update: Callable[..., Tensor], batch: list[int]) -> Tensor:
    """Earlier micro-batches add their gradients after the reduction."""
    loop.earlier = []
    return update(batch)


def _put_aside(loop: Any, loss_sum: Callable[..., Tensor], ids: Sequence[int]) -> Tensor:
    for parameter in loop.trained:
        if parameter.grad is not None:
            loop.earlier.append((parameter, parameter.grad))
            parameter.grad = None
    return loss_sum(ids)


def _added_behind(loop: Any, add: Callable[[Tensor], None], total: Tensor) -> None:
    add(total)
    for parameter, gradient in loop.earlier:
        parameter.grad += gradient


def _moment_astray(loop: Any, apply: Callable[[], None]) -> None:
    apply()
    if dist.get_rank() == 1 and loop.due:
        loop.optimizer.state[loop.trained[0]]["exp_avg"].view(-1)[0] += 1


def _own_rate(loop: Any, apply: Callable[[], None]) -> None:
    if dist.get_rank() == 1 and loop.due:
        loop.optimizer.param_groups[0]["lr"] *= 0.1
    apply()


def _flipped(flip: Callable[[Tensor], Tensor]) -> type[PlainLoop]:
    """One weight of rank 1 changes between two updates."""
    return disturbed(lambda loop: flip(loop.trained[0].detach().view(-1)[:1]), at=3, on=1)


def _spoilt_behind(loop: Any, add: Callable[[Tensor], None], total: Tensor) -> None:
    add(total)
    gradient = loop.trained[-1].grad
    if dist.get_rank() == 1 and loop.due and gradient is not None:
        gradient.view(-1)[0] += 0.5


def _rounded_otherwise(loop: Any, apply: Callable[[], None]) -> None:
    apply()
    if dist.get_rank() == 1 and loop.done + 1 >= loop.at:
        weight = loop.trained[-1].detach().view(-1)
        weight[0] = torch.nextafter(weight[0], torch.tensor(torch.inf))


def renew_head(loop: PlainLoop) -> None:
    """Replace the head's parameter by a new one of the same values. The optimizer keeps the old one."""
    inner = loop.model.module if isinstance(loop.model, DistributedDataParallel) else loop.model
    names = {id(parameter): name for name, parameter in inner.named_parameters()}
    place, _, name = names[id(loop.trained[-1])].rpartition(".")
    new = nn.Parameter(loop.trained[-1].detach().clone())
    setattr(inner.get_submodule(place), name, new)
    loop.trained[-1] = new


_CLAIM, _SAME, _REDUCED = "replicas-agree", "replicas-agree", Inside("gradients-agree", 1)
_GRADIENT = Outside(_CLAIM, r"step 1, rank 1: the gradient differs")
FAULTS = (
    LoopFault("F01", "initial weights differ", changed(made=_own_start), Inside(_SAME, 0),
              Outside(_CLAIM, "before step 1, rank 1: the initial weights differ")),
    # The watch sees no reduction, so it suspects weights that differ at once, and is certain at the close.
    LoopFault("F02", "nothing reduced", changed(_add_over_ranks=lambda *args: dist.all_reduce(args[-1])),
              Inside(_SAME, 1), _GRADIENT),
    LoopFault("F02", "DDP bypassed through its module", changed(Wrapped, _wrapped=_bypassed), _REDUCED, _GRADIENT),
    LoopFault("F04", "adapters outside the wrapper", changed(Wrapped, _wrapped=_adapters_alone), _REDUCED, _GRADIENT),
    LoopFault("F05", "adapters put in after wrapping", changed(Wrapped, _wrapped=_adapter_afterwards), _REDUCED,
              _GRADIENT),
    LoopFault("F05", "module put in while training",
              disturbed(lambda loop: setattr(loop.model, "injected", nn.Linear(2, 2)), at=3),
              Inside("parameters-kept", 3), Outside("gradient-law", r"step 3: injected\.\w+ has a different layout")),
    LoopFault("F07", "cast after wrapping", changed(Wrapped, _wrapped=_cast_afterwards), _REDUCED, _GRADIENT),
    LoopFault("F08", "parameter replaced after wrapping",
              changed(Wrapped, made=_replaced_afterwards, _wrapped=_wrapped_with_unused), _REDUCED, _GRADIENT),
    LoopFault("F08", "parameter replaced while training", disturbed(renew_head, at=3),
              Inside("parameters-kept", 3),
              Outside("gradient-law", r"step 4: 1 of 15 tensors differ from the float64 reference.*score\.weight")),
    LoopFault("F10", "only the last micro-batch reduced",
              changed(_update=_last_alone, _loss_sum=_put_aside, _add_over_ranks=_added_behind), _REDUCED, _GRADIENT),
    LoopFault("F11", "buffers not synchronised", changed(Tracking, _share=lambda *_: None), Inside("buffers-agree", 1),
              Outside(_CLAIM, "before step 2, rank 1: running statistics differ")),
    LoopFault("F13", "moment of one rank astray", changed(_apply=_moment_astray), Inside("optimizers-agree", 4, at=3),
              Outside(_CLAIM, "step 2, rank 1: the optimizer differs", ADAMW)),
    LoopFault("F14", "rank-local learning rate", changed(at=3, _apply=_own_rate),
              Inside("hyperparameters-agree", 5, at=5), Outside("schedule", "step 3, rank 1: a different learning")),
    LoopFault("F89", "bit flip in a weight", _flipped(lambda weight: weight.mul_(1 + 2.0**-10)), Inside(_SAME, 4, at=4),
              Outside(_CLAIM, "step 2, rank 1: the weights differ")),
    LoopFault("F89", "bit flip below torch",
              _flipped(lambda weight: weight.data.view(torch.int32).bitwise_xor_(1 << 12)), Inside(_SAME, 4, at=4),
              Outside(_CLAIM, "step 2, rank 1: the weights differ")),
    LoopFault("F91", "corruption after the reduction", changed(_add_over_ranks=_spoilt_behind),
              Inside("gradients-agree", 4, at=4), Outside(_CLAIM, "step 2, rank 1: the gradient differs")),
    LoopFault("F92", "one rank rounds otherwise", changed(at=1, _apply=_rounded_otherwise), Inside(_SAME, 4, at=3),
              Outside(_CLAIM, "step 1, rank 1: the weights differ")),
    LoopFault("F89", "average of weights kept up on one rank",
              changed(Averaged, _follow=lambda _, follow: None if dist.get_rank() else follow()),
              Inside("copies-agree", 2), "a loop shows its model, and the average is not a part of it"),
)  # fmt: skip
