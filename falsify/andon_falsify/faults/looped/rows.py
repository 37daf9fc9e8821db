"""Faults of data and of random numbers: sections E and F of the catalogue."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from andon_falsify.faults.looped.fault import SGD, LoopFault
from andon_falsify.faults.looped.right import Labelled, Noisy, Streamed
from andon_falsify.loops.record import global_batch
from andon_falsify.loops.task import collate
from andon_falsify.peers.plain import PlainLoop
from andon_falsify.subjects.case import Case


class Padded(PlainLoop):
    """A batch is filled up with its first rows until every rank has equally many."""

    def _mine(self, batch: list[int]) -> list[int]:
        return super()._mine(batch + batch[: -len(batch) % dist.get_world_size()])


class LastDropped(PlainLoop):
    """The last batch of an epoch is left out if it is short."""

    def _batches(self) -> Iterator[list[int]]:
        yield from (batch for batch in super()._batches() if len(batch) == global_batch(self.case))


class OwnOrder(PlainLoop):
    """Every rank has shuffled the data set by itself, so that the same index is another row."""

    def _mine(self, batch: list[int]) -> list[int]:
        own = torch.Generator().manual_seed(self.case.seed + 100 + dist.get_rank())
        order = torch.randperm(len(self.rows), generator=own).tolist()
        return [order[row] for row in super()._mine(batch)]


class Unsharded(PlainLoop):
    """Every rank trains on the first rows of the batch."""

    def _mine(self, batch: list[int]) -> list[int]:
        return batch[: len(super()._mine(batch))]


class OwnLabels(Labelled):
    """The map from labels to classes is another one on rank 1."""

    def _labels(self, labels: Tensor) -> Tensor:
        return (labels + 1) % self.case.rows.classes if dist.get_rank() == 1 else labels


class ShiftedLabels(Labelled):
    """The labels of a micro-batch are shifted by one row."""

    def _labels(self, labels: Tensor) -> Tensor:
        return labels.roll(1)


class ShiftedUnseen(PlainLoop):
    """The same, of labels that the model is not given."""

    def _loss_sum(self, ids: Sequence[int]) -> Tensor:
        batch = collate([self.rows[row] for row in ids])
        labels = batch.pop("labels").roll(1)
        return cross_entropy(self.model(**batch).logits, labels, reduction="sum")


class SameMasks(PlainLoop):
    """All ranks are seeded alike."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        torch.manual_seed(case.seed)


class SameNoise(Noisy):
    """All ranks are seeded alike, so that they draw the same noise."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        torch.manual_seed(case.seed)


class NeverEvaluating(PlainLoop):
    """Dropout goes on in evaluation."""

    def evaluate(self) -> Mapping[str, float]:
        """See `Evaluates.evaluate`."""
        handle = self.model.register_forward_pre_hook(_into_training)
        try:
            return super().evaluate()
        finally:
            handle.remove()


def _into_training(model: nn.Module, _: object) -> None:
    model.train()


class NeverTraining(PlainLoop):
    """It evaluates after the first update, and trains on in evaluation mode."""

    def _update(self, batch: list[int]) -> Tensor:
        if self.done == 1:
            self.model.eval()
        return super()._update(batch)


class DrawnOnOne(Streamed):
    """Rank 0 has drawn one number more from the stream that all have alike."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        if dist.get_rank() == 0:
            torch.rand(1, generator=self.stream)


_ROWS = "samples-once"
DROPOUT = SGD.but(dropout=0.1)
FAULTS = (
    LoopFault("F46", "sampler pads with repeats", Padded, _ROWS, "step 2: rows used more than once"),
    LoopFault("F47", "last batch dropped", LastDropped, _ROWS, "rows that were never visited"),
    LoopFault("F49", "rank-local order of the data", OwnOrder, _ROWS, "rows used more than once, by ranks 0, 1"),
    LoopFault("F50", "data not sharded", Unsharded, _ROWS, "step 1: rows used more than once, by ranks 0, 1"),
    LoopFault("F52", "label map of one rank", OwnLabels, _ROWS, r"step 1, rank 1: .*with label \d instead of \d"),
    LoopFault("F53", "labels shifted", ShiftedLabels, _ROWS, r"with label \d instead of \d"),
    LoopFault(
        "F53",
        "labels shifted, unseen by the model",
        ShiftedUnseen,
        "gradient-law",
        r"step 2: .*row \d+ as label \d instead of \d",
    ),
    LoopFault(
        "F55",
        "same dropout masks",
        SameMasks,
        "randomness-apart",
        "step 1: ranks draw the same random numbers",
        DROPOUT,
    ),
    LoopFault(
        "F56", "same augmentation", SameNoise, "randomness-apart", "step 1: ranks draw the same random numbers", DROPOUT
    ),
    LoopFault(
        "F58",
        "dropout in evaluation",
        NeverEvaluating,
        "evaluation-law",
        "the evaluation loss is not that of every row once",
        SGD.but(dropout=0.5),
    ),
    LoopFault(
        "F58",
        "training in evaluation mode",
        NeverTraining,
        "randomness-apart",
        "step 2, ranks 0, 1: training goes on without dropout.*the model in evaluation mode",
    ),
    LoopFault("F59", "shared stream drawn on one rank", DrawnOnOne, _ROWS, "rows used more than once, by ranks 0, 1"),
)
