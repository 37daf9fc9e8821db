"""Faults of data and of random numbers: sections E and F of the catalogue."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, RandomSampler, Subset
from torch.utils.data.distributed import DistributedSampler

from andon_falsify.loops.task import collate
from andon_falsify.peers.plain import PlainLoop
from andon_falsify.subjects.case import Case, make_rows

from .fault import SGD, WATCHED, Inside, LoopFault, Outside, changed, disturbed
from .right import Dealt, Labelled, Loaded, Noisy


def _drawn_by(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _own_order(loop: Any) -> None:
    """Every rank shuffles the dataset by itself, so that an index is another row on every rank."""
    own = _drawn_by(loop.case.seed + 100 + dist.get_rank())
    loop.rows = Subset(loop.rows, torch.randperm(len(loop.rows), generator=own).tolist())


def _own_split(loop: Any) -> None:
    own = torch.randperm(len(loop.rows), generator=_drawn_by(dist.get_rank()))
    rows = Subset(loop.rows, own[: len(own) // 2].tolist())
    loop.sampler = DistributedSampler(rows, seed=loop.case.seed)
    loop.loader = DataLoader(rows, batch_size=loop.case.local_batch, sampler=loop.sampler, collate_fn=collate)


def _dropping(loop: Any) -> None:
    loop.loader = DataLoader(loop.rows, loop.case.local_batch, sampler=loop.sampler, drop_last=True, collate_fn=collate)


def _other_label(loop: PlainLoop, _: object, labels: Tensor) -> Tensor:
    return (labels + 1) % loop.case.rows.classes if dist.get_rank() == 1 else labels


def _shifted_unseen(loop: PlainLoop, _: object, ids: Sequence[int]) -> Tensor:
    batch = collate([loop.rows[row] for row in ids])
    labels = batch.pop("labels").roll(1)
    return cross_entropy(loop.model(**batch).logits, labels, reduction="sum")


def _seeded_alike(loop: PlainLoop) -> None:
    torch.manual_seed(loop.case.seed)


def _never_evaluating(loop: PlainLoop, evaluate: Callable[[], Mapping[str, float]]) -> Mapping[str, float]:
    def into_training(model: nn.Module, _: object) -> None:
        model.train()

    handle = loop.model.register_forward_pre_hook(into_training)
    try:
        return evaluate()
    finally:
        handle.remove()


DROPOUT, _MASKED = SGD.but(dropout=0.1), WATCHED.but(dropout=0.1)
_CONTENT = Inside("content-planned", 1, ("batch", "content", "contents"))
_DRAWN = Inside("randomness-declared", 1, ("expect",), _MASKED, says="all ranks drew the same masks")


def _twice(step: int, rows: str, case: Case = SGD) -> Outside:
    reason = f"step {step}: rows used more than once, by ranks 0, 1; expected each once, seen rows {rows}"
    return Outside("samples-once", reason, case)


_ALIKE = Outside("randomness-apart", "step 1: ranks draw the same random numbers", DROPOUT)
_EVEN = WATCHED.but(rows=make_rows(36))
_OVERLAP = Inside("samples-once", 2, (), _EVEN.but(seed=3))
_EPOCHS = _EVEN.but(max_steps=8)
_LOADED = SGD.but(rows=make_rows(16))
_BY_LOADER = "the row of the same code without a data loader shows it"
_OTHER_LABEL = r"with label \d instead of \d"
FAULTS = (
    LoopFault("F46", "sampler pads with repeats",
              changed(_mine=lambda _, mine, batch: mine(batch + batch[: -len(batch) % dist.get_world_size()])),
              Inside("samples-once", 5, ("batch", "rows")), _twice(2, "10 ")),
    LoopFault("F47", "last batch dropped",
              changed(_batches=lambda loop, all_: (each for each in all_() if len(each) == loop.case.global_batch)),
              Inside("samples-once", 5, ("batch", "plan")),
              Outside("samples-once", "epoch 0: rows that were never visited; expected rows 1, 6, 7, 9, 10,")),
    LoopFault("F46", "DistributedSampler pads with repeats",
              changed(Dealt, _sampler=lambda loop, _: DistributedSampler(loop.rows, seed=loop.case.seed)),
              Inside("", 0, says=r"rows: one pass over the data repeated 1 of its 37 rows"), _BY_LOADER),
    LoopFault("F47", "last batch of a data loader dropped", changed(Dealt, made=_dropping),
              Inside("", 0, says=r"rows: one pass over the data left out at least 1 of its 37 rows"), _BY_LOADER),
    LoopFault("F49", "rank-local order of the data", changed(made=_own_order),
              Inside("content-planned", 0, ("contents", "rows")), _twice(3, "12 ")),
    LoopFault("F50", "data not sharded", changed(_mine=lambda _, mine, batch: batch[: len(mine(batch))]),
              Inside("samples-once", 1, ("batch",)), _twice(1, "0 .* 3 .* 4 ")),
    LoopFault("F50", "loader not dealt out",
              changed(Loaded, _sampler=lambda loop, _: RandomSampler(loop.rows, generator=_drawn_by(loop.case.seed))),
              Inside("samples-once", 2, (), _EVEN), _twice(1, "6 .* 9 .* 10 .* 12 ", _LOADED)),
    LoopFault("F50", "sampler seeded by rank",
              changed(Loaded, _sampler=lambda loop, _: DistributedSampler(
                  loop.rows, seed=loop.case.seed + dist.get_rank())),
              _OVERLAP, _twice(1, "12 ", _LOADED)),
    LoopFault("F50", "split of each rank's own", changed(Loaded, made=_own_split), _OVERLAP, _twice(1, "5 ", _LOADED)),
    LoopFault("F49", "epochs in one order", changed(Loaded, _begin=lambda *_: None),
              Inside("order-renewed", 7, (), _EPOCHS),
              "every row is visited once in each epoch, and no claim says that the epochs have different orders"),
    LoopFault("F52", "label map of one rank", changed(Labelled, _labels=_other_label), _CONTENT,
              Outside("samples-once", rf"step 1, rank 1: .*{_OTHER_LABEL}")),
    LoopFault("F53", "labels shifted", changed(Labelled, _labels=lambda _, __, labels: labels.roll(1)), _CONTENT,
              Outside("samples-once", f"step 2, rank 1: .*{_OTHER_LABEL}")),
    LoopFault("F53", "labels shifted, unseen by the model", changed(_loss_sum=_shifted_unseen),
              Inside("gradient-law", 1, ("batch", "reference")),
              Outside("gradient-law", r"step 2: .*row \d+ as label \d instead of \d")),
    LoopFault("F55", "same dropout masks", changed(made=_seeded_alike), _DRAWN, _ALIKE),
    LoopFault("F56", "same augmentation", changed(Noisy, made=_seeded_alike), _DRAWN, _ALIKE),
    LoopFault("F58", "dropout in evaluation", changed(evaluate=_never_evaluating),
              Inside("evaluation-once", 6, ("evaluated",), WATCHED.but(dropout=0.5)),
              Outside("evaluation-law", r"the evaluation loss is not that of every row once; .*ratio 1\.004",
                      SGD.but(dropout=0.5))),
    # As a loop that evaluates after the first update, and stays in evaluation mode.
    LoopFault("F58", "training in evaluation mode", disturbed(lambda loop: loop.model.eval()),
              Inside("training-mode", 3, (), _MASKED),
              Outside("randomness-apart",
                      "step 2, ranks 0, 1: training goes on without dropout.*the model in evaluation mode")),
    LoopFault("F59", "shared stream drawn on one rank",
              disturbed(lambda loop: torch.rand(1, generator=loop.stream), Dealt, at=1, on=0),
              Inside("randomness-declared", 5, ("expect",), _EPOCHS, 4, alone="samples-once", alone_by=8),
              _twice(3, "13 ", _LOADED)),
)  # fmt: skip
