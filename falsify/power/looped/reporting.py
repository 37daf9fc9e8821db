"""Faults of evaluating and reporting: section J of the catalogue."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from andon_falsify.peers.plain import PlainLoop

from .fault import WATCHED, Inside, LoopFault, Outside, changed
from .right import Tracking

_Metrics = Mapping[str, float]


def _padded(loop: PlainLoop, _: object) -> _Metrics:
    """The rows are filled up so that every rank has equally many, and the repeats are counted."""
    ids = list(range(len(loop.rows)))
    ids += ids[: -len(ids) % dist.get_world_size()]
    sums = loop._scores(loop._mine(ids))
    dist.all_reduce(sums)
    loss, accuracy = (sums / len(ids)).tolist()
    return {"loss": loss, "accuracy": accuracy}


def _own_rows(loop: PlainLoop) -> list[int]:
    return loop._mine(list(range(len(loop.rows))))


def _whole_numbers(loop: PlainLoop, _: object) -> _Metrics:
    """How many rows are right is averaged over the ranks as a whole number."""
    sums = loop._scores(_own_rows(loop))
    right = sums[1].to(torch.int64)
    dist.all_reduce(sums)
    dist.all_reduce(right)
    world = dist.get_world_size()
    right.copy_(right / world)
    return {"loss": float(sums[0]) / len(loop.rows), "accuracy": int(right) * world / len(loop.rows)}


def _one_reports_otherwise(loop: PlainLoop, evaluate: Callable[[], _Metrics]) -> _Metrics:
    """Rank 1 reports the sum over its own rows."""
    whole = evaluate()
    own = loop._scores(_own_rows(loop)) / len(loop.rows)
    return whole if dist.get_rank() == 0 else {"loss": float(own[0]), "accuracy": float(own[1])}


def _stepping(loop: PlainLoop, evaluate: Callable[[], _Metrics]) -> _Metrics:
    """The evaluation ends with a step of the optimizer, by gradients that were left over."""
    found = evaluate()
    for parameter in loop.trained:
        parameter.grad = torch.ones_like(parameter)
    loop.optimizer.step()
    return found


def _tracking(loop: Tracking, evaluate: Callable[[], _Metrics]) -> _Metrics:
    """As statistics of a normalisation that is left in training mode."""
    found = evaluate()
    with torch.enable_grad():
        loop._loss_sum(range(len(loop.rows)))
    return found


def _own_metric(loop: PlainLoop, _: object) -> _Metrics:
    own = _own_rows(loop)
    loss, accuracy = (loop._scores(own) / len(own)).tolist()
    return {"loss": loss, "accuracy": accuracy}


def _own_loss(loop: PlainLoop, update: Callable[..., Tensor], batch: list[int]) -> Tensor:
    return update(batch) * len(batch) / len(loop._mine(batch))


_TOLD = Inside("evaluation-once", 6, ("evaluated",))
_ONCE = "the evaluation loss is not that of every row once"
FAULTS = (
    LoopFault("F83", "best checkpoint by a metric of own rows", changed(evaluate=_own_metric), _TOLD,
              Outside("evaluation-law", rf"{_ONCE}; .*ratio 1\.025")),
    LoopFault("F85", "evaluation pads with repeats", changed(evaluate=_padded), _TOLD,
              Outside("evaluation-law", rf"{_ONCE}; .*ratio 0\.993")),
    LoopFault("F86", "metric from whole numbers", changed(evaluate=_whole_numbers),
              replace(_TOLD, case=WATCHED.but(seed=1)),
              Outside("evaluation-law", r"the accuracy is not that of every row once; .*11 of 13\), seen 0\.769")),
    LoopFault("F88", "evaluation of one rank reported", changed(evaluate=_one_reports_otherwise), _TOLD,
              Outside("evaluation-law", rf"rank 1: {_ONCE}; .*ratio 0\.448")),
    LoopFault("F89", "weights changed by the evaluation", changed(evaluate=_stepping),
              "a watch reads the weights at an update, and none comes after it",
              Outside("evaluation-law", "the evaluation changed 15 tensors of the model")),
    LoopFault("F58", "running statistics follow the evaluation", changed(Tracking, evaluate=_tracking),
              "it computes gradients, in training mode, which a watch takes for training",
              Outside("evaluation-law", r"the evaluation changed 1 tensors of the model.*running_mean")),
    LoopFault("F88", "loss of one rank reported",
              changed(_update=_own_loss, _add_over_ranks=lambda _, add, total: add(total.clone())),
              Inside("loss-reported", 1, ("loss",)),
              Outside("losses-close", r"step 1: the reported loss is not that of the law; .*seen 1\.0662")),
)  # fmt: skip
