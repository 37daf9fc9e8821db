"""The parts of a case that a loop's author needs: model, dataset, collate, optimizer. Ordinary torch objects.

Every call returns new objects of the same content, and so does every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from andon.console.messages import InputError, install_hint
from andon_falsify.subjects.case import PAD, VOCABULARY, Case, Rows, make_rows


def loop_case(**changes: Any) -> Case:
    """The default case of a loop: 31 rows in batches of 12 (12, 12, 7) on 2 ranks, two epochs, no dropout.

    A global batch of 12 rows divides evenly on 1 to 4 ranks. `changes` as for `Case.but`.
    """
    plain = Case(rows=make_rows(31), batch_size=12, micro_batches=4, epochs=2, dropout=0.0, world=2, backend="gloo")
    return plain.but(**changes)


def distinct(rows: Rows, longest: int) -> Rows:
    """`rows` without repeats: a row that is there already gets one more token, or another last token.

    longest: the most tokens that a row may have. Raises `ValueError` if no free row is left.
    """
    used: dict[tuple[int, ...], None] = {}
    for row in rows.tokens:
        start = row if len(row) < longest else row[:-1]
        candidates = (row, *((*start, token) for token in range(33, VOCABULARY)))
        free = next((each for each in candidates if each not in used), None)
        if free is None:
            raise ValueError(f"{len(rows)} rows of at most {longest} tokens cannot all be told apart")
        used[free] = None
    return Rows(tuple(used), rows.labels, rows.classes)


class _Rows(Dataset[dict[str, list[int] | int]]):
    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, list[int] | int]:
        tokens = list(self._rows.tokens[index])
        return {"input_ids": tokens, "attention_mask": [1] * len(tokens), "labels": self._rows.labels[index]}


def dataset(case: Case) -> _Rows:
    """The rows of `case` by id, unpadded: `{"input_ids": [...], "attention_mask": [1, ...], "labels": 2}`."""
    return _Rows(case.rows)


def collate(items: Sequence[Any]) -> dict[str, Tensor]:
    """A list of rows of `dataset` as int64 tensors: input_ids and attention_mask [rows, length], labels [rows]."""
    length = max((len(item["input_ids"]) for item in items), default=1)
    padded = [[*item["input_ids"], *[PAD] * (length - len(item["input_ids"]))] for item in items]
    mask = [[*item["attention_mask"], *[0] * (length - len(item["input_ids"]))] for item in items]
    return {
        "input_ids": torch.tensor(padded, dtype=torch.int64).view(-1, length),
        "attention_mask": torch.tensor(mask, dtype=torch.int64).view(-1, length),
        "labels": torch.tensor([item["labels"] for item in items], dtype=torch.int64),
    }


def model(case: Case) -> nn.Module:
    """The model of `case` before training, in training mode. The bits are the same in every call and on every rank.

    A small `Qwen3ForSequenceClassification`, or `BertForSequenceClassification` for an encoder, that is not downloaded;
    with peft's LoRA if the case has a rank; then most parameters are frozen (`requires_grad` is False).
    `model(**collate(items))` returns `.loss` (the mean over its rows) and `.logits` [rows, classes].
    With nccl it is on the rank's GPU; the loop moves its batches. Raises `InputError` without transformers or peft.
    """
    if absent := [name for name in ("transformers", "peft") if find_spec(name) is None]:
        remedy = f"{install_hint('falsify')}; or train a torch module of your own, with loss_sum"
        raise InputError.at("model(case)", f"needs {' and '.join(absent)}; {remedy}")
    from andon_falsify.subjects.assembly import model_of

    return model_of(case).train().to("cuda" if case.backend == "nccl" else "cpu")


def optimizer(case: Case, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of `case`, torch's own SGD or AdamW, over those `parameters` that train."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if case.optimizer == "sgd":
        return torch.optim.SGD(trained, lr=case.lr, momentum=case.momentum, weight_decay=case.weight_decay)
    return torch.optim.AdamW(trained, lr=case.lr, weight_decay=case.weight_decay)
