"""The parts of a case that a loop's author needs: model, data set, collate, optimizer. Ordinary torch objects.

Every call gives new objects of the same content, on every rank alike.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset, DistributedSampler

from andon_falsify.subjects.assembly import model_of
from andon_falsify.subjects.case import PAD, VOCABULARY, Case, Rows, make_rows


def loop_case(**changes: Any) -> Case:
    """The default case of a foreign loop: 31 rows in batches of 12 (12, 12, 7) on 2 ranks, two epochs, no dropout.

    12 rows are one global batch on 1 to 4 ranks, see `shaped`. `changes` as for `Case.but`.
    """
    plain = Case(
        rows=make_rows(31),
        batch_size=12,
        micro_batches=4,
        epochs=2,
        dropout=0.0,
        world=2,
        backend="gloo",
    )
    return plain.but(**changes)


def shaped(case: Case, world: int, accumulation: int) -> Case:
    """`case` on `world` ranks with `accumulation` micro-batches each, at the same global batch.

    Raises `ValueError` where the rows of a batch cannot be dealt evenly.
    """
    if case.batch_size % (world * accumulation):
        msg = f"{case.batch_size} rows are not {world} ranks x {accumulation} micro-batches of one size"
        raise ValueError(msg)
    return case.but(world=world, micro_batches=world * accumulation)


def distinct(rows: Rows, longest: int) -> Rows:
    """`rows` with no two of the same tokens: a repeated one gets a token more, or another last one.

    longest: tokens that a row may have. Raises `ValueError` where no free row is found.
    """
    taken: set[tuple[int, ...]] = set()
    tokens = []
    for row in rows.tokens:
        own = row if row not in taken else next((other for other in _near(row, longest) if other not in taken), None)
        if own is None:
            msg = f"{len(rows)} rows of at most {longest} tokens cannot all be told apart"
            raise ValueError(msg)
        taken.add(own)
        tokens.append(own)
    return Rows(tuple(tokens), rows.labels, rows.classes)


def _near(row: tuple[int, ...], longest: int) -> Iterable[tuple[int, ...]]:
    kept = row if len(row) < longest else row[:-1]
    return ((*kept, token) for token in range(33, VOCABULARY))


class RowsDataset(Dataset[dict[str, list[int] | int]]):
    """The rows of a case: `{"input_ids": [...], "attention_mask": [1, ...], "labels": 2}`, unpadded."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, list[int] | int]:
        tokens = list(self._rows.tokens[index])
        return {"input_ids": tokens, "attention_mask": [1] * len(tokens), "labels": self._rows.labels[index]}


def dataset(case: Case) -> RowsDataset:
    """The rows of `case` as a map-style data set; the place of a row is its id."""
    return RowsDataset(case.rows)


def collate(items: Sequence[Any]) -> dict[str, Tensor]:
    """Rows as int64 tensors, padded on the right: input_ids and attention_mask [rows, length], labels [rows]."""
    length = max((len(item["input_ids"]) for item in items), default=1)
    padded = [[*item["input_ids"], *[PAD] * (length - len(item["input_ids"]))] for item in items]
    mask = [[*item["attention_mask"], *[0] * (length - len(item["input_ids"]))] for item in items]
    return {
        "input_ids": torch.tensor(padded, dtype=torch.int64).view(-1, length),
        "attention_mask": torch.tensor(mask, dtype=torch.int64).view(-1, length),
        "labels": torch.tensor([item["labels"] for item in items], dtype=torch.int64),
    }


def model(case: Case) -> nn.Module:
    """The model of `case` before training, the same bits on every call and rank, in training mode.

    A small `Qwen3ForSequenceClassification` (`BertForSequenceClassification` for an encoder), not downloaded, with
    peft's LoRA where the case has a rank. `model(**collate(items))` gives `.loss` (the mean over rows) and `.logits`.
    """
    return model_of(case).train()


def optimizer(case: Case, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of `case`, torch's own SGD or AdamW, over those of `parameters` that train."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if case.optimizer == "sgd":
        return torch.optim.SGD(trained, lr=case.lr, momentum=case.momentum, weight_decay=case.weight_decay)
    return torch.optim.AdamW(trained, lr=case.lr, weight_decay=case.weight_decay)


def windows(case: Case, sampler: DistributedSampler[int], loader: Iterable[Any]) -> Iterator[list[Any]]:
    """The micro-batches of each update, as `loader` gives them; the last of an epoch has what is left."""
    for epoch in range(case.epochs):
        sampler.set_epoch(epoch)
        batches = list(loader)
        for start in range(0, len(batches), case.accumulation):
            yield batches[start : start + case.accumulation]


def as_launched() -> None:
    """Set the variables of torchrun for the process group that this process belongs to already.

    Libraries join a group that is there, so address and port are never used; they only have to be set.
    """
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world, GROUP_RANK="0")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", TORCHELASTIC_RUN_ID="andon")
