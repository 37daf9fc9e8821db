"""Faults of the gradient: sections B (reduction), C (accumulation) and D (clipping, precision) of the catalogue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from andon_falsify.peers.plain import PlainLoop, cut
from andon_falsify.subjects.case import Poison

from .fault import ADAMW, SGD, WATCHED, Inside, LoopFault, Outside, changed, disturbed
from .right import SCALE, LossScaled, Wrapped


def multiplied(factor: Callable[[Any, Sequence[int]], tuple[float, float]], at: int = 2) -> type[PlainLoop]:
    """The loss sum of the micro-batch `ids` is multiplied and divided by the two numbers of factor(loop, ids).

    `loop.batch` is the batch, and `loop.own` the number of its rows on this rank.
    """

    def update(loop: Any, inner: Callable[..., Tensor], batch: list[int]) -> Tensor:
        loop.batch, loop.own = batch, len(loop._mine(batch))
        return inner(batch)

    def loss_sum(loop: Any, inner: Callable[..., Tensor], ids: Sequence[int]) -> Tensor:
        times, by = factor(loop, ids)
        return inner(ids) * times / by

    return changed(at=at, _update=update, _loss_sum=loss_sum)


def _local_class_weights(loop: Any, _: Sequence[int]) -> tuple[float, float]:
    weights = [float(loop.weights[loop.case.rows.labels[row]]) for row in loop._mine(loop.batch)]
    return len(loop.batch), sum(weights) * dist.get_world_size()


def _mean_of_micro_means(loop: Any, ids: Sequence[int]) -> tuple[float, float]:
    world = dist.get_world_size()
    pieces = sum(len(cut(loop.batch[rank::world], loop.case.local_batch)) for rank in range(world))
    return len(loop.batch), len(ids) * pieces


def _temporary(loop: PlainLoop, _: object, total: Tensor) -> None:
    for parameter in loop.trained:
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad.t().contiguous().clone())
    dist.all_reduce(total)


def _other_order(loop: PlainLoop, _: object, total: Tensor) -> None:
    """Rank 1 reduces tensors of one shape in the opposite order."""
    by_shape: dict[torch.Size, list[Tensor]] = {}
    for parameter in loop.trained:
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        parameter.grad = gradient
        by_shape.setdefault(gradient.shape, []).append(gradient)
    for gradients in by_shape.values():
        for gradient in reversed(gradients) if dist.get_rank() == 1 else gradients:
            dist.all_reduce(gradient)
    dist.all_reduce(total)


def _stale(loop: Any, add: Callable[[Tensor], None], total: Tensor) -> None:
    """Rank 1 contributes the gradient of the update before."""
    if dist.get_rank() == 1:
        now = [torch.zeros_like(p) if p.grad is None else p.grad for p in loop.trained]
        for parameter, gradient in zip(loop.trained, getattr(loop, "before", now), strict=True):
            parameter.grad = gradient.clone()
        loop.before = now
    add(total)


def _never_zeroed(loop: PlainLoop, _: object) -> None:
    if loop.case.clip_norm is not None:
        _clip(loop)
    loop.optimizer.step()


def _zeroed_too_often(loop: PlainLoop, loss_sum: Callable[..., Tensor], ids: Sequence[int]) -> Tensor:
    loop.optimizer.zero_grad()
    return loss_sum(ids)


def _window_dropped(loop: PlainLoop, update: Callable[..., Tensor], batch: list[int]) -> Tensor:
    if len(batch) == loop.case.global_batch:
        return update(batch)
    losses = [loop._loss_sum(piece) / len(batch) for piece in cut(loop._mine(batch), loop.case.local_batch)]
    total = torch.stack(losses).sum()
    total.backward()  # type: ignore[no-untyped-call]
    loop.optimizer.zero_grad()
    return total.detach()


def _clip(loop: PlainLoop) -> None:
    assert loop.case.clip_norm is not None
    clip_grad_norm_(loop.trained, loop.case.clip_norm)


def _norm_over_replicas(loop: PlainLoop, _: object) -> None:
    """The norm is summed over the replicas as if they were shards."""
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


def _clipped_per_micro_batch(loop: PlainLoop, loss_sum: Callable[..., Tensor], ids: Sequence[int]) -> Tensor:
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


def _half_head(loop: PlainLoop) -> None:
    """The head computes in bfloat16, with inputs and outputs of the model's type."""

    def halved(_: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(each.to(torch.bfloat16) for each in given)

    def restored(_: nn.Module, __: object, out: Tensor) -> Tensor:
        return out.float()

    head = next(module for name, module in loop.model.named_modules() if name.endswith("score"))
    head.to(torch.bfloat16)
    head.register_forward_pre_hook(halved)
    head.register_forward_hook(restored)


def _scale(code: str, what: str, loop: type[PlainLoop], says: str, by: int = 1) -> tuple[LoopFault, LoopFault]:
    """A wrong scale, with SGD, and with AdamW and clipping, which almost hide it from the weights.

    The one line sees it at the second update, by the graph of the loss and the reduction.
    """
    inside = replace(_law(by), alone="gradient-scale", alone_by=max(by, 2))
    hidden = "what a watch sees is trained with AdamW and clipping as it is"
    return (
        LoopFault(code, what, loop, inside, Outside("gradient-law", says)),
        LoopFault(code, f"{what}, AdamW clipped", loop, hidden, Outside("gradient-law", says, ADAMW)),
    )


def _law(by: int, says: str = "") -> Inside:
    """Seen by the gradient, which the watch computes again from the rows that the loop reports."""
    return Inside("gradient-law", by, ("batch", "reference"), says=says)


_WEIGHTS = (0.5, 1.0, 2.0)
_SHORT = r"step 2: .*ratio 0\.625 = 5 of 8 rows: a short window is divided as a full one"
_UNREDUCED = Outside("replicas-agree", r"step 1, rank 1: the gradient differs")
_ROWS = ("batch", "plan")
_HALF_HEAD = changed(made=_half_head)
_CLIPPED = SGD.but(clip_norm=0.05)
_ROUNDED = WATCHED.but(lr=2e-8)
FAULTS = (
    *_scale("F16", "sum instead of mean", multiplied(lambda loop, _: (len(loop.batch), loop.own)),
            r"step 1: .*ratio 2\.000 = .*world 2"),
    LoopFault("F17", "mean of ranks' means",
              multiplied(lambda loop, _: (len(loop.batch), loop.own * dist.get_world_size())), _law(5, "between ranks"),
              Outside("gradient-law", r"step 2: .*it is the mean of the means of 2 ranks")),
    *_scale("F19", "averaged twice", multiplied(lambda *_: (1, dist.get_world_size())),
            r"step 1: .*ratio 0\.500 = .*1 / world 2"),
    *_scale("F20", "loss times world size", multiplied(lambda *_: (dist.get_world_size(), 1)),
            r"step 1: .*ratio 2\.000 = .*world 2"),
    LoopFault("F22", "class weights normalised locally", multiplied(_local_class_weights),
              Inside("gradient-law", 1, ("batch", "reference"), WATCHED.but(class_weights=_WEIGHTS)),
              Outside("gradient-law", r"step 1: .*rows? .* counts? .* times", SGD.but(class_weights=_WEIGHTS))),
    LoopFault("F23", "reduction of a temporary", changed(_add_over_ranks=_temporary), Inside("gradients-agree", 1),
              _UNREDUCED),
    LoopFault("F25", "collectives in another order", changed(_add_over_ranks=_other_order),
              Inside("collectives-agree", 1), _UNREDUCED),
    LoopFault("F26", "stale gradient on one rank", changed(_add_over_ranks=_stale), _law(2),
              Outside("gradient-law", r"step 2: .*rank 1's part is that of the update")),
    LoopFault("F28", "mean of micro-batches' means", multiplied(_mean_of_micro_means), _law(5, "between micro-batches"),
              Outside("gradient-law", "step 2: .*the means of 3 micro-batches")),
    *_scale("F29", "accumulation divided twice", multiplied(lambda loop, _: (1, loop.case.accumulation)),
            r"ratio 0\.500 = 1 / accumulation 2"),
    LoopFault("F31", "zero_grad missing", changed(_apply=_never_zeroed), Inside("gradient-fresh", 2),
              Outside("gradient-law", "step 2: .*the gradient of the update before")),
    LoopFault("F32", "zero_grad for each micro-batch", changed(_loss_sum=_zeroed_too_often),
              Inside("samples-once", 1, _ROWS, alone="gradient-scale", alone_by=2),
              Outside("gradient-law", "step 1: .*not at all")),
    LoopFault("F34", "partial window dropped", changed(_update=_window_dropped),
              Inside("samples-once", 5, _ROWS, says="accumulation: 1 backward pass computed and never applied"),
              Outside("samples-once", r"forward passes after the last update")),
    *_scale("F35", "partial window divided as a full one",
            multiplied(lambda loop, _: (len(loop.batch), loop.case.global_batch)), _SHORT, by=5),
    LoopFault("F37", "clip norm summed over replicas", changed(_apply=_norm_over_replicas),
              Inside("clip-once", 2, ("clip", "reduced")),
              Outside("update-law", r"clipped by a norm that is not the gradient's.*ratio 1\.414", _CLIPPED)),
    LoopFault("F38", "clip before unscale",
              changed(LossScaled, _add_over_ranks=_reduced_scaled, _apply=_clipped_scaled), Inside("clip-placed", 1),
              Outside("gradient-law", r"step 1: .*ratio 1024\.000", _CLIPPED)),
    LoopFault("F38", "clipped before the reduction",
              changed(_add_over_ranks=_clipped_unreduced, _apply=lambda loop, _: loop._step()),
              Inside("clip-placed", 1),
              Outside("update-law", "step 1: clipped before the gradient was whole", _CLIPPED)),
    LoopFault("F38", "clipped for each micro-batch", changed(Wrapped, _loss_sum=_clipped_per_micro_batch),
              Inside("clip-placed", 1), Outside("gradient-law", r"step 1: .*rows .* count 0\.\d+ times", _CLIPPED)),
    LoopFault("F40", "overflow zeroed by clip", multiplied(lambda loop, _: (1e21 if loop.due else 1.0, 1), at=3),
              Inside("finite", 3), Outside("gradient-law", r"step 3: .*ratio 1e\+21", ADAMW)),
    LoopFault("F41", "NaN hidden by nan_to_num", changed(_add_over_ranks=_nan_hidden),
              Inside("finite", 3, case=WATCHED.but(poison=Poison(3, 2, "nan"))),
              Outside("halt-together", "a planted fault left no violation")),
    LoopFault("F43", "loss scale of one rank", disturbed(lambda loop: loop.scaler.update(SCALE / 2), LossScaled, on=1),
              Inside("scaler-agrees", 4, ("scaler",), at=4, alone="gradients-agree"),
              Outside("replicas-agree", "step 2, rank 1: the gradient differs")),
    LoopFault("F44", "16-bit head", _HALF_HEAD, Inside("precision-sufficient", 0, case=_ROUNDED),
              "its updates are rounded away, which is another fault of this list"),
    LoopFault("F44", "updates of a 16-bit head rounded away", _HALF_HEAD, Inside("update-applied", 2, case=_ROUNDED),
              Outside("update-law",
                      r"score\.weight is not the result.*a step of length (\S+), seen a step that ends \1 away",
                      SGD.but(lr=2e-6))),
)  # fmt: skip
