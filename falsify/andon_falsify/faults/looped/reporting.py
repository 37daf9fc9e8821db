"""Faults of evaluating and reporting: section J of the catalogue."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from andon_falsify.faults.looped.fault import LoopFault
from andon_falsify.peers.plain import PlainLoop


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


class OwnLoss(PlainLoop):
    """What is reported is the mean loss of rank 0's rows."""

    def _update(self, batch: list[int]) -> Tensor:
        return super()._update(batch) * len(batch) / len(self._mine(batch))

    def _add_over_ranks(self, total: Tensor) -> None:
        super()._add_over_ranks(total.clone())


FAULTS = (
    LoopFault(
        "F85",
        "evaluation pads with repeats",
        PaddedEvaluation,
        "evaluation-law",
        "the evaluation loss is not that of every row once",
    ),
    LoopFault(
        "F86", "metric from whole numbers", WholeNumbers, "evaluation-law", "the accuracy is not that of every row once"
    ),
    LoopFault(
        "F88", "loss of one rank reported", OwnLoss, "losses-close", "step 1: the reported loss is not that of the law"
    ),
)
