"""Faults of clipping, values that are not finite, and precision: section D of the catalogue."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from andon_falsify.peers.plain import PlainLoop
from andon_falsify.subjects.case import Case, Poison

from .arithmetic import Multiplied
from .fault import ADAMW, SGD, WATCHED, Inside, LoopFault, Outside, Timed
from .right import SCALE, LossScaled, Wrapped


class ReplicasSummed(PlainLoop):
    """The norm by which gradients are clipped is summed over the replicas, as if they were shards."""

    def _apply(self) -> None:
        assert self.case.clip_norm is not None
        squares = sum((p.grad.square().sum() for p in self.trained if p.grad is not None), torch.zeros(()))
        dist.all_reduce(squares)
        torch.nn.utils.clip_grads_with_norm_(self.trained, self.case.clip_norm, squares.sqrt())
        self._step()


class ClippedScaled(LossScaled):
    """Gradients are clipped while they are still multiplied."""

    def _add_over_ranks(self, total: Tensor) -> None:
        PlainLoop._add_over_ranks(self, total)
        total.div_(SCALE)

    def _apply(self) -> None:
        assert self.case.clip_norm is not None
        torch.nn.utils.clip_grad_norm_(self.trained, self.case.clip_norm)
        self._unscale()
        self._step()


class ClippedEach(Wrapped):
    """What has been summed is clipped after each micro-batch."""

    def _loss_sum(self, ids: Sequence[int]) -> Tensor:
        if any(parameter.grad is not None for parameter in self.trained):
            assert self.case.clip_norm is not None
            torch.nn.utils.clip_grad_norm_(self.trained, self.case.clip_norm)
        return super()._loss_sum(ids)


class ClippedUnreduced(PlainLoop):
    """Every rank clips its own part, and the parts are added."""

    def _add_over_ranks(self, total: Tensor) -> None:
        assert self.case.clip_norm is not None
        torch.nn.utils.clip_grad_norm_(self.trained, self.case.clip_norm)
        super()._add_over_ranks(total)

    def _apply(self) -> None:
        self._step()


class Overflowing(Multiplied, Timed):
    """One gradient is finite, but its norm is not, so that clipping makes it zero."""

    at = 3

    def _factor(self, ids: Sequence[int]) -> tuple[float, float]:
        return (1e21 if self.due else 1.0), 1


class NanHidden(PlainLoop):
    """What is not finite is taken for zero."""

    def _add_over_ranks(self, total: Tensor) -> None:
        for parameter in self.trained:
            if parameter.grad is not None:
                parameter.grad.nan_to_num_(0.0, 0.0, 0.0)
        super()._add_over_ranks(total)


class OwnScale(Timed, LossScaled):
    """Rank 1 has halved its scale, and the others have not."""

    def _update(self, batch: list[int]) -> Tensor:
        if dist.get_rank() == 1 and self.due:
            self.scaler.update(SCALE / 2)
        return super()._update(batch)


class HalfHead(PlainLoop):
    """The head is in bfloat16, and the rate so small that its updates are rounded away."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        head = next(module for name, module in self.model.named_modules() if name.endswith("score"))
        head.to(torch.bfloat16)
        head.register_forward_pre_hook(_halved)
        head.register_forward_hook(_whole)


def _halved(_: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(each.to(torch.bfloat16) for each in given)


def _whole(_: nn.Module, __: object, out: Tensor) -> Tensor:
    return out.float()


_CLIPPED = SGD.but(clip_norm=0.05)
_ROUNDED = WATCHED.but(lr=2e-8)
FAULTS = (
    LoopFault("F37", "clip norm summed over replicas", ReplicasSummed, Inside("clip-once", 2, ("clip", "reduced")),
              Outside("update-law", r"clipped by another norm than the gradient's.*ratio 1\.414", _CLIPPED)),
    LoopFault("F38", "clip before unscale", ClippedScaled, Inside("clip-placed", 1),
              Outside("gradient-law", r"step 1: .*ratio 1024\.000", _CLIPPED)),
    LoopFault("F38", "clipped before the reduction", ClippedUnreduced, Inside("clip-placed", 1),
              Outside("update-law", "step 1: clipped before the gradient was whole", _CLIPPED)),
    LoopFault("F38", "clipped for each micro-batch", ClippedEach, Inside("clip-placed", 1),
              Outside("gradient-law", r"step 1: .*rows .* count 0\.\d+ times", _CLIPPED)),
    LoopFault("F40", "overflow zeroed by clip", Overflowing, Inside("finite", 3),
              Outside("gradient-law", r"step 3: .*ratio 1e\+21", ADAMW)),
    LoopFault("F41", "NaN hidden by nan_to_num", NanHidden,
              Inside("finite", 3, case=WATCHED.but(poison=Poison(3, 2, "nan"))),
              Outside("halt-together", "a planted fault left no violation")),
    LoopFault("F43", "loss scale of one rank", OwnScale,
              Inside("scaler-agrees", 4, ("scaler",), at=4, alone="gradients-agree"),
              Outside("replicas-agree", "step 2, rank 1: the gradient differs")),
    LoopFault("F44", "16-bit head", HalfHead, Inside("precision-sufficient", 0, case=_ROUNDED),
              "its updates are rounded away, which is a fault of its own in this list"),
    LoopFault("F44", "updates of a 16-bit head rounded away", HalfHead, Inside("update-applied", 2, case=_ROUNDED),
              Outside("update-law",
                      r"score\.weight is not where.*a step of length (\S+), seen a step that ends \1 away",
                      SGD.but(lr=2e-6))),
)  # fmt: skip
