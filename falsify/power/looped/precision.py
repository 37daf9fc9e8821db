"""Faults of clipping, values that are not finite, and precision: section D of the catalogue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from andon_falsify.peers.plain import PlainLoop
from andon_falsify.subjects.case import Poison

from .arithmetic import multiplied
from .fault import ADAMW, SGD, WATCHED, Inside, LoopFault, Outside, changed
from .right import SCALE, LossScaled, Wrapped


def _clip(loop: PlainLoop) -> None:
    assert loop.case.clip_norm is not None
    clip_grad_norm_(loop.trained, loop.case.clip_norm)


def _replicas_summed(loop: PlainLoop, _: object) -> None:
    """The norm is summed over the replicas, as if they were shards."""
    assert loop.case.clip_norm is not None
    squares = sum((p.grad.square().sum() for p in loop.trained if p.grad is not None), torch.zeros(()))
    dist.all_reduce(squares)
    torch.nn.utils.clip_grads_with_norm_(loop.trained, loop.case.clip_norm, squares.sqrt())
    loop._step()


def _reduced_scaled(loop: LossScaled, _: object, total: Tensor) -> None:
    PlainLoop._add_over_ranks(loop, total)
    total.div_(SCALE)


def _clipped_scaled(loop: LossScaled, _: object) -> None:
    _clip(loop)
    loop._unscale()
    loop._step()


def _clipped_each(loop: PlainLoop, loss_sum: Callable[..., Tensor], ids: Sequence[int]) -> Tensor:
    if any(parameter.grad is not None for parameter in loop.trained):
        _clip(loop)
    return loss_sum(ids)


def _clipped_unreduced(loop: PlainLoop, add: Callable[[Tensor], None], total: Tensor) -> None:
    _clip(loop)
    add(total)


def _nan_hidden(loop: PlainLoop, add: Callable[[Tensor], None], total: Tensor) -> None:
    for parameter in loop.trained:
        if parameter.grad is not None:
            parameter.grad.nan_to_num_(0.0, 0.0, 0.0)
    add(total)


def _own_scale(loop: Any, update: Callable[..., Tensor], batch: list[int]) -> Tensor:
    if dist.get_rank() == 1 and loop.due:
        loop.scaler.update(SCALE / 2)
    return update(batch)


def _half_head(loop: PlainLoop) -> None:
    head = next(module for name, module in loop.model.named_modules() if name.endswith("score"))
    head.to(torch.bfloat16)
    head.register_forward_pre_hook(_halved)
    head.register_forward_hook(_whole)


def _halved(_: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(each.to(torch.bfloat16) for each in given)


def _whole(_: nn.Module, __: object, out: Tensor) -> Tensor:
    return out.float()


_HALF_HEAD = changed(made=_half_head)
_CLIPPED = SGD.but(clip_norm=0.05)
_ROUNDED = WATCHED.but(lr=2e-8)
FAULTS = (
    LoopFault("F37", "clip norm summed over replicas", changed(_apply=_replicas_summed),
              Inside("clip-once", 2, ("clip", "reduced")),
              Outside("update-law", r"clipped by another norm than the gradient's.*ratio 1\.414", _CLIPPED)),
    LoopFault("F38", "clip before unscale",
              changed(LossScaled, _add_over_ranks=_reduced_scaled, _apply=_clipped_scaled), Inside("clip-placed", 1),
              Outside("gradient-law", r"step 1: .*ratio 1024\.000", _CLIPPED)),
    LoopFault("F38", "clipped before the reduction",
              changed(_add_over_ranks=_clipped_unreduced, _apply=lambda loop, _: loop._step()),
              Inside("clip-placed", 1),
              Outside("update-law", "step 1: clipped before the gradient was whole", _CLIPPED)),
    LoopFault("F38", "clipped for each micro-batch", changed(Wrapped, _loss_sum=_clipped_each),
              Inside("clip-placed", 1), Outside("gradient-law", r"step 1: .*rows .* count 0\.\d+ times", _CLIPPED)),
    LoopFault("F40", "overflow zeroed by clip", multiplied(lambda loop, _: (1e21 if loop.due else 1.0, 1), at=3),
              Inside("finite", 3), Outside("gradient-law", r"step 3: .*ratio 1e\+21", ADAMW)),
    LoopFault("F41", "NaN hidden by nan_to_num", changed(_add_over_ranks=_nan_hidden),
              Inside("finite", 3, case=WATCHED.but(poison=Poison(3, 2, "nan"))),
              Outside("halt-together", "a planted fault left no violation")),
    LoopFault("F43", "loss scale of one rank", changed(LossScaled, _update=_own_scale),
              Inside("scaler-agrees", 4, ("scaler",), at=4, alone="gradients-agree"),
              Outside("replicas-agree", "step 2, rank 1: the gradient differs")),
    LoopFault("F44", "16-bit head", _HALF_HEAD, Inside("precision-sufficient", 0, case=_ROUNDED),
              "its updates are rounded away, which is a fault of its own in this list"),
    LoopFault("F44", "updates of a 16-bit head rounded away", _HALF_HEAD, Inside("update-applied", 2, case=_ROUNDED),
              Outside("update-law",
                      r"score\.weight is not where.*a step of length (\S+), seen a step that ends \1 away",
                      SGD.but(lr=2e-6))),
)  # fmt: skip
