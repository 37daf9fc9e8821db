"""Faults of evaluating and reporting: section J of the catalogue."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from andon_falsify.peers.plain import PlainLoop

from .fault import WATCHED, Inside, LoopFault, Outside
from .right import Tracking


class PaddedEvaluation(PlainLoop):
    """The rows are filled up so that every rank has equally many, and the repeats are counted."""

    def evaluate(self) -> Mapping[str, float]:
        """See `Evaluates.evaluate`."""
        ids = list(range(len(self.rows)))
        ids += ids[: -len(ids) % dist.get_world_size()]
        sums = self._scores(self._mine(ids))
        dist.all_reduce(sums)
        loss, accuracy = (sums / len(ids)).tolist()
        return {"loss": loss, "accuracy": accuracy}


class WholeNumbers(PlainLoop):
    """How many rows are right is averaged over the ranks as a whole number."""

    def evaluate(self) -> Mapping[str, float]:
        """See `Evaluates.evaluate`."""
        sums = self._scores(self._mine(list(range(len(self.rows)))))
        right = sums[1].to(torch.int64)
        dist.all_reduce(sums)
        dist.all_reduce(right)
        world = dist.get_world_size()
        right.copy_(right / world)
        return {"loss": float(sums[0]) / len(self.rows), "accuracy": int(right) * world / len(self.rows)}


class OneReportsOtherwise(PlainLoop):
    """Rank 1 reports the sum over its own rows."""

    def evaluate(self) -> Mapping[str, float]:
        """See `Evaluates.evaluate`."""
        whole = super().evaluate()
        own = self._scores(self._mine(list(range(len(self.rows))))) / len(self.rows)
        return whole if dist.get_rank() == 0 else {"loss": float(own[0]), "accuracy": float(own[1])}


class SteppingEvaluation(PlainLoop):
    """The evaluation ends with a step of the optimizer, by gradients that were left over."""

    def evaluate(self) -> Mapping[str, float]:
        """See `Evaluates.evaluate`."""
        found = super().evaluate()
        for parameter in self.trained:
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        return found


class TrackingEvaluation(Tracking):
    """Running statistics follow the evaluation too, as those of normalisation that is left in training mode do."""

    def evaluate(self) -> Mapping[str, float]:
        """See `Evaluates.evaluate`."""
        found = super().evaluate()
        with torch.enable_grad():
            self._loss_sum(range(len(self.rows)))
        return found


class OwnMetric(PlainLoop):
    """Every rank evaluates its own rows, by which it is to choose its best checkpoint."""

    def evaluate(self) -> Mapping[str, float]:
        """See `Evaluates.evaluate`."""
        own = self._mine(list(range(len(self.rows))))
        loss, accuracy = (self._scores(own) / len(own)).tolist()
        return {"loss": loss, "accuracy": accuracy}


class OwnLoss(PlainLoop):
    """What is reported is the mean loss of rank 0's rows."""

    def _update(self, batch: list[int]) -> Tensor:
        return super()._update(batch) * len(batch) / len(self._mine(batch))

    def _add_over_ranks(self, total: Tensor) -> None:
        super()._add_over_ranks(total.clone())


_TOLD = Inside("evaluation-once", 6, ("evaluated",))
_ONCE = "the evaluation loss is not that of every row once"
FAULTS = (
    LoopFault("F83", "best checkpoint by a metric of own rows", OwnMetric, _TOLD,
              Outside("evaluation-law", rf"{_ONCE}; .*ratio 1\.025")),
    LoopFault("F85", "evaluation pads with repeats", PaddedEvaluation, _TOLD,
              Outside("evaluation-law", rf"{_ONCE}; .*ratio 0\.993")),
    LoopFault("F86", "metric from whole numbers", WholeNumbers, replace(_TOLD, case=WATCHED.but(seed=1)),
              Outside("evaluation-law", r"the accuracy is not that of every row once; .*11 of 13\), seen 0\.769")),
    LoopFault("F88", "evaluation of one rank reported", OneReportsOtherwise, _TOLD,
              Outside("evaluation-law", rf"rank 1: {_ONCE}; .*ratio 0\.448")),
    LoopFault("F89", "weights changed by the evaluation", SteppingEvaluation,
              "a watch reads the weights at an update, and none comes after it",
              Outside("evaluation-law", "the evaluation changed 15 tensors of the model")),
    LoopFault("F58", "running statistics follow the evaluation", TrackingEvaluation,
              "it computes gradients, in training mode, which a watch takes for training",
              Outside("evaluation-law", r"the evaluation changed 1 tensors of the model.*running_mean")),
    LoopFault("F88", "loss of one rank reported", OwnLoss, Inside("loss-reported", 1, ("loss",)),
              Outside("losses-close", r"step 1: the reported loss is not that of the law; .*seen 1\.0662")),
)  # fmt: skip
