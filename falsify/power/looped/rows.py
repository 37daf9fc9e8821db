"""Faults of data and of random numbers: sections E and F of the catalogue."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, RandomSampler, Sampler, Subset
from torch.utils.data.distributed import DistributedSampler

from andon_falsify.loops.task import collate
from andon_falsify.peers.plain import PlainLoop
from andon_falsify.subjects.case import Case, make_rows

from .fault import SGD, WATCHED, Inside, LoopFault, Outside, Timed
from .right import Labelled, Loaded, Noisy, Streamed


class Padded(PlainLoop):
    """A batch is filled up with its first rows until every rank has equally many."""

    def _mine(self, batch: list[int]) -> list[int]:
        return super()._mine(batch + batch[: -len(batch) % dist.get_world_size()])


class LastDropped(PlainLoop):
    """The last batch of an epoch is left out if it is short."""

    def _batches(self) -> Iterator[list[int]]:
        yield from (batch for batch in super()._batches() if len(batch) == self.case.global_batch)


class OwnOrder(PlainLoop):
    """Every rank has shuffled the data set by itself, so that the same index is another row."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        own = torch.Generator().manual_seed(case.seed + 100 + dist.get_rank())
        self.rows = Subset(self.rows, torch.randperm(len(self.rows), generator=own).tolist())  # type: ignore[assignment]


class Unsharded(PlainLoop):
    """Every rank trains on the first rows of the batch."""

    def _mine(self, batch: list[int]) -> list[int]:
        return batch[: len(super()._mine(batch))]


class NotDealtOut(Loaded):
    """Nothing deals out the rows, and all ranks shuffle them alike."""

    def _sampler(self) -> Sampler[int]:
        return RandomSampler(self.rows, generator=torch.Generator().manual_seed(self.case.seed))


class OwnShuffle(Loaded):
    """The sampler of every rank is seeded by itself, so that their shares are of different orders."""

    def _sampler(self) -> Sampler[int]:
        return DistributedSampler(self.rows, seed=self.case.seed + dist.get_rank())


class OwnSplit(Loaded):
    """Every rank has split off other rows to train on."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        own = torch.randperm(len(self.rows), generator=torch.Generator().manual_seed(dist.get_rank()))
        rows = Subset(self.rows, own[: len(own) // 2].tolist())
        self.sampler = DistributedSampler(rows, seed=case.seed)
        self.loader = DataLoader(rows, batch_size=case.local_batch, sampler=self.sampler, collate_fn=collate)


class SameOrder(Loaded):
    """The sampler is not told of a new epoch."""

    def _begin(self, epoch: int) -> None:
        pass


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


class NeverTraining(Timed):
    """It evaluates after the first update, and trains on in evaluation mode."""

    def _update(self, batch: list[int]) -> Tensor:
        if self.due:
            self.model.eval()
        return super()._update(batch)


class DrawnOnOne(Timed, Streamed):
    """Rank 0 draws one number more from the stream that all have alike, before an update."""

    at = 1

    def _batches(self) -> Iterator[list[int]]:
        planned = super()._batches()
        for update in range(1, 1 + self.case.updates(self.case.global_batch)):
            if dist.get_rank() == 0 and update == self.at:
                torch.rand(1, generator=self.stream)
            yield next(planned)


DROPOUT, _MASKED = SGD.but(dropout=0.1), WATCHED.but(dropout=0.1)
_CONTENT = Inside("content-planned", 1, ("batch", "content", "contents"))
_DRAWN = Inside("randomness-declared", 1, ("expect",), _MASKED)


def _twice(step: int, rows: str, case: Case = SGD) -> Outside:
    reason = f"step {step}: rows used more than once, by ranks 0, 1; expected each once, seen rows {rows}"
    return Outside("samples-once", reason, case)


_ALIKE = Outside("randomness-apart", "step 1: ranks draw the same random numbers", DROPOUT)
_EVEN = WATCHED.but(rows=make_rows(36))
_OVERLAP = Inside("samples-once", 2, (), _EVEN.but(seed=3))
_EPOCHS = _EVEN.but(max_steps=8)
_LOADED = SGD.but(rows=make_rows(16))
_OTHER_LABEL = r"with label \d instead of \d"
FAULTS = (
    LoopFault("F46", "sampler pads with repeats", Padded, Inside("samples-once", 5, ("batch", "rows")),
              _twice(2, "10 ")),
    LoopFault("F47", "last batch dropped", LastDropped, Inside("samples-once", 5, ("batch", "plan")),
              Outside("samples-once", "epoch 0: rows that were never visited; expected rows 1, 6, 7, 9, 10,")),
    LoopFault("F49", "rank-local order of the data", OwnOrder, Inside("content-planned", 0, ("contents", "rows")),
              _twice(3, "12 ")),
    LoopFault("F50", "data not sharded", Unsharded, Inside("samples-once", 1, ("batch",)), _twice(1, "0 .* 3 .* 4 ")),
    LoopFault("F50", "loader not dealt out", NotDealtOut, Inside("samples-once", 2, (), _EVEN),
              _twice(1, "6 .* 9 .* 10 .* 12 ", _LOADED)),
    LoopFault("F50", "sampler seeded by rank", OwnShuffle, _OVERLAP, _twice(1, "12 ", _LOADED)),
    LoopFault("F50", "split of each rank's own", OwnSplit, _OVERLAP, _twice(1, "5 ", _LOADED)),
    LoopFault("F49", "epochs in one order", SameOrder, Inside("order-renewed", 7, (), _EPOCHS),
              "every row is visited once in each epoch, and no claim says that epochs have orders of their own"),
    LoopFault("F52", "label map of one rank", OwnLabels, _CONTENT,
              Outside("samples-once", rf"step 1, rank 1: .*{_OTHER_LABEL}")),
    LoopFault("F53", "labels shifted", ShiftedLabels, _CONTENT,
              Outside("samples-once", f"step 2, rank 1: .*{_OTHER_LABEL}")),
    LoopFault("F53", "labels shifted, unseen by the model", ShiftedUnseen,
              Inside("gradient-law", 1, ("batch", "reference")),
              Outside("gradient-law", r"step 2: .*row \d+ as label \d instead of \d")),
    LoopFault("F55", "same dropout masks", SameMasks, _DRAWN, _ALIKE),
    LoopFault("F56", "same augmentation", SameNoise, _DRAWN, _ALIKE),
    LoopFault("F58", "dropout in evaluation", NeverEvaluating,
              Inside("evaluation-once", 6, ("evaluated",), WATCHED.but(dropout=0.5)),
              Outside("evaluation-law", r"the evaluation loss is not that of every row once; .*ratio 1\.004",
                      SGD.but(dropout=0.5))),
    LoopFault("F58", "training in evaluation mode", NeverTraining,
              Inside("training-mode", 3, (), _MASKED),
              Outside("randomness-apart",
                      "step 2, ranks 0, 1: training goes on without dropout.*the model in evaluation mode")),
    LoopFault("F59", "shared stream drawn on one rank", DrawnOnOne,
              Inside("randomness-declared", 4, ("expect",), _MASKED, at=4), _twice(1, "2 .* 5 ")),
)  # fmt: skip
