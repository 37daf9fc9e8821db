"""Faults of reduction and accumulation: sections B and C of the catalogue. Most leave the ranks alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from andon_falsify.peers.plain import PlainLoop, cut

from .fault import ADAMW, SGD, WATCHED, Inside, LoopFault, Outside


class Multiplied(PlainLoop):
    """The sum of losses is multiplied and divided by something before it is divided by the rows of the batch."""

    batch: list[int]

    def _update(self, batch: list[int]) -> Tensor:
        self.batch = batch
        return super()._update(batch)

    def _loss_sum(self, ids: Sequence[int]) -> Tensor:
        times, by = self._factor(ids)
        return super()._loss_sum(ids) * times / by

    def _factor(self, ids: Sequence[int]) -> tuple[float, float]:
        """By which the losses of the micro-batch `ids` are multiplied, and by which they are divided."""
        raise NotImplementedError

    @property
    def own_rows(self) -> int:
        """How many rows of the batch this rank has."""
        return len(self._mine(self.batch))


class SumOfMeans(Multiplied):
    """The ranks' means are added and not divided."""

    def _factor(self, ids: Sequence[int]) -> tuple[float, float]:
        return len(self.batch), self.own_rows


class MeanOfMeans(Multiplied):
    """The mean of the ranks' means."""

    def _factor(self, ids: Sequence[int]) -> tuple[float, float]:
        return len(self.batch), self.own_rows * dist.get_world_size()


class AveragedTwice(Multiplied):
    """The right mean, divided by the number of ranks again."""

    def _factor(self, ids: Sequence[int]) -> tuple[float, float]:
        return 1, dist.get_world_size()


class TimesWorld(Multiplied):
    """The right mean, times the number of ranks."""

    def _factor(self, ids: Sequence[int]) -> tuple[float, float]:
        return dist.get_world_size(), 1


class WeighedLocally(Multiplied):
    """Class weights are normalised by their sum on the rank."""

    def _factor(self, ids: Sequence[int]) -> tuple[float, float]:
        assert self.weights is not None
        weights = [float(self.weights[self.case.rows.labels[row]]) for row in self._mine(self.batch)]
        return len(self.batch), sum(weights) * dist.get_world_size()


class Temporary(PlainLoop):
    """What is reduced is a copy of the gradient."""

    def _add_over_ranks(self, total: Tensor) -> None:
        for parameter in self.trained:
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad.t().contiguous().clone())
        dist.all_reduce(total)


class OtherOrder(PlainLoop):
    """Rank 1 reduces tensors of one shape in the opposite order."""

    def _add_over_ranks(self, total: Tensor) -> None:
        alike: dict[torch.Size, list[Tensor]] = {}
        for parameter in self.trained:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = gradient
            alike.setdefault(gradient.shape, []).append(gradient)
        for gradients in alike.values():
            for gradient in reversed(gradients) if dist.get_rank() == 1 else gradients:
                dist.all_reduce(gradient)
        dist.all_reduce(total)


class Stale(PlainLoop):
    """Rank 1 contributes what it computed for the update before."""

    before: Sequence[Tensor] = ()

    def _add_over_ranks(self, total: Tensor) -> None:
        if dist.get_rank() == 1:
            now = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.trained]
            for parameter, gradient in zip(self.trained, self.before or now, strict=True):
                parameter.grad = gradient.clone()
            self.before = now
        super()._add_over_ranks(total)


class MeanOfMicroMeans(Multiplied):
    """Every micro-batch counts the same, whatever its rows."""

    def _factor(self, ids: Sequence[int]) -> tuple[float, float]:
        world = dist.get_world_size()
        pieces = sum(len(cut(self.batch[rank::world], self.case.local_batch)) for rank in range(world))
        return len(self.batch), len(ids) * pieces


class DividedTwice(Multiplied):
    """The right mean, divided by the accumulation again."""

    def _factor(self, ids: Sequence[int]) -> tuple[float, float]:
        return 1, self.case.accumulation


class NeverZeroed(PlainLoop):
    """Gradients are never set to zero."""

    def _apply(self) -> None:
        if self.case.clip_norm is not None:
            clip_grad_norm_(self.trained, self.case.clip_norm)
        self.optimizer.step()


class ZeroedTooOften(PlainLoop):
    """Gradients are set to zero before every micro-batch."""

    def _loss_sum(self, ids: Sequence[int]) -> Tensor:
        self.optimizer.zero_grad()
        return super()._loss_sum(ids)


class WindowDropped(PlainLoop):
    """A window of fewer micro-batches is computed, and no update made of it."""

    def _update(self, batch: list[int]) -> Tensor:
        if len(batch) == self.case.global_batch:
            return super()._update(batch)
        losses = [self._loss_sum(piece) / len(batch) for piece in cut(self._mine(batch), self.case.local_batch)]
        total = torch.stack(losses).sum()
        total.backward()  # type: ignore[no-untyped-call]
        self.optimizer.zero_grad()
        return total.detach()


class DividedByWhole(Multiplied):
    """A window of fewer rows is divided as if it were full."""

    def _factor(self, ids: Sequence[int]) -> tuple[float, float]:
        return len(self.batch), self.case.global_batch


_HIDDEN = "what a watch sees is trained with AdamW and clipping as it is"


def _scale(code: str, what: str, loop: type[PlainLoop], says: str, by: int = 1) -> tuple[LoopFault, LoopFault]:
    """A wrong scale, with SGD, and with AdamW and clipping, where the weights hardly show it.

    The one line sees it by the graph of the loss and the reduction, at the second update.
    """
    inside = replace(_law(by), alone="gradient-scale", alone_by=max(by, 2))
    return (
        LoopFault(code, what, loop, inside, Outside("gradient-law", says)),
        LoopFault(code, f"{what}, AdamW clipped", loop, _HIDDEN, Outside("gradient-law", says, ADAMW)),
    )


def _law(by: int) -> Inside:
    """Found by the gradient, computed again from the rows that were told."""
    return Inside("gradient-law", by, ("batch", "reference"))


_WEIGHTS = (0.5, 1.0, 2.0)
_SHORT = r"step 2: .*ratio 0\.625 = 5 of 8 rows: a short window is divided as a full one"
_UNREDUCED = Outside("replicas-agree", r"step 1, rank 1: the gradient differs")
_ROWS = ("batch", "plan")
FAULTS = (
    *_scale("F16", "sum instead of mean", SumOfMeans, r"step 1: .*ratio 2\.000 = .*world 2"),
    LoopFault("F17", "mean of ranks' means", MeanOfMeans, _law(5),
              Outside("gradient-law", r"step 2: .*it is the mean of the means of 2 ranks")),
    *_scale("F19", "averaged twice", AveragedTwice, r"step 1: .*ratio 0\.500 = .*1 / world 2"),
    *_scale("F20", "loss times world size", TimesWorld, r"step 1: .*ratio 2\.000 = .*world 2"),
    LoopFault("F22", "class weights normalised locally", WeighedLocally,
              Inside("gradient-law", 1, ("batch", "reference"), WATCHED.but(class_weights=_WEIGHTS)),
              Outside("gradient-law", r"step 1: .*rows? .* counts? .* times", SGD.but(class_weights=_WEIGHTS))),
    LoopFault("F23", "reduction of a temporary", Temporary, Inside("gradients-agree", 1), _UNREDUCED),
    LoopFault("F25", "collectives in another order", OtherOrder, Inside("collectives-agree", 1), _UNREDUCED),
    LoopFault("F26", "stale gradient on one rank", Stale, _law(2),
              Outside("gradient-law", r"step 2: .*rank 1's part is that of the update")),
    LoopFault("F28", "mean of micro-batches' means", MeanOfMicroMeans, _law(5),
              Outside("gradient-law", "step 2: .*the means of 3 micro-batches")),
    *_scale("F29", "accumulation divided twice", DividedTwice, r"ratio 0\.500 = 1 / accumulation 2"),
    LoopFault("F31", "zero_grad missing", NeverZeroed, Inside("gradient-fresh", 2),
              Outside("gradient-law", "step 2: .*the gradient of the update before")),
    LoopFault("F32", "zero_grad for each micro-batch", ZeroedTooOften, Inside("samples-once", 1, _ROWS),
              Outside("gradient-law", "step 1: .*not at all")),
    LoopFault("F34", "partial window dropped", WindowDropped, Inside("samples-once", 5, _ROWS),
              Outside("samples-once", r"forward passes after the last update")),
    *_scale("F35", "partial window divided as a full one", DividedByWhole, _SHORT, by=5),
)  # fmt: skip
