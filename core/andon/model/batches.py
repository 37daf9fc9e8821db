"""Rows as a model's input: padded, copied to its device, and passed through it.

A batch is padded to its own longest row, so its shape depends on its rows and not on the rank that computes it.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from andon.model.build import computing, evaluating, without_adapter
from andon.model.masks import Masking, masked, masking_of, padding_of, rotate_rows
from andon.step.task import Batch

_MOST_ROWS, _MOST_TOKENS = 64, 4096
Shape = tuple[int, int]
"""Rows and padded length of a micro-batch."""


def padded_length(longest: int, multiple: int, limit: int | None = None) -> int:
    """`longest` rounded up to `multiple`, but not beyond `limit`."""
    length = -(-longest // multiple) * multiple
    return length if limit is None else max(longest, min(length, limit))


def shapes_of(batch_size: int, micro_batches: int, lengths: Collection[int]) -> frozenset[Shape]:
    """The shapes of micro-batches of full global batches: one or two numbers of rows, each of `lengths`."""
    rows = {batch_size // micro_batches, -(-batch_size // micro_batches)} - {0}
    return frozenset((count, length) for count in rows for length in lengths)


def length_step(max_length: int, count: int, multiple: int = 8) -> int:
    """The multiple to pad to for at most `count` lengths up to `max_length`; itself a multiple of `multiple`."""
    return padded_length(-(-max_length // count), multiple)


def padded_lengths(max_length: int, step: int) -> tuple[int, ...]:
    """The lengths to which rows of at most `max_length` tokens are padded."""
    return tuple(padded_length(length, step, max_length) for length in range(1, max_length + 1, step))


def collate(rows: Sequence[Tensor], pad_id: int, multiple: int, limit: int | None = None) -> dict[str, Tensor]:
    """Rows (int64 vectors, none empty) padded on the right: input_ids and attention_mask, int64 [rows, length]. length:
    that of the longest row, rounded up to `multiple` but not beyond `limit`."""
    lengths = torch.tensor([row.numel() for row in rows])
    length = padded_length(int(lengths.max()), multiple, limit)
    ids = nn.utils.rnn.pad_sequence([*rows], batch_first=True, padding_value=pad_id)
    ids = nn.functional.pad(ids, (0, length - ids.shape[1]), value=pad_id)
    return {"input_ids": ids, "attention_mask": (torch.arange(length) < lengths[:, None]).long()}


def placed(batch: Batch, device: torch.device) -> dict[str, Tensor]:
    """int64 tensors on `device`; a GPU gets them in one copy from pinned memory that the host does not wait for."""
    if device.type != "cuda":
        return {name: tensor.to(device) for name, tensor in batch.items()}
    joined = torch.cat([tensor.flatten() for tensor in batch.values()]).pin_memory().to(device, non_blocking=True)
    parts = torch.split(joined, [tensor.numel() for tensor in batch.values()])
    return {name: part.view(tensor.shape) for (name, tensor), part in zip(batch.items(), parts, strict=True)}


def logits_of(model: nn.Module, batch: Batch) -> Tensor:
    """[rows, classes]: one forward pass without labels, in the precision of the model's weights (autocast)."""
    device, names = batch["input_ids"].device, ["input_ids", "attention_mask"]
    if "token_type_ids" in batch:
        base = without_adapter(model)
        several = getattr(getattr(base, "config", None), "type_vocab_size", 2) > 1
        if several and "token_type_ids" in inspect.signature(type(base).forward).parameters:
            names.append("token_type_ids")
    given = {name: batch[name] for name in names}
    on_left = padding_of(model, device).side == "left"
    if on_left:
        shift = batch["attention_mask"].sum(dim=1)
        given = {name: rotate_rows(values, shift) for name, values in given.items()}
    masking = Masking.TOKENS if on_left else masking_of(model, device)
    with computing(model, device), masked(model, masking, given.pop("attention_mask")) as mask:
        logits: Tensor = model(attention_mask=mask, **given).logits
    return rotate_rows(logits, -shift) if on_left and logits.dim() == 3 else logits


def predictions(model: nn.Module, batch: Batch) -> Tensor:
    """fp32 [rows, classes]: logits in evaluation mode, without a graph."""
    with evaluating(model, batch["input_ids"].device):
        return logits_of(model, batch).float()


@dataclass(frozen=True)
class EvaluationBatching:
    """Batches that are scored: at most 64 rows, and `tokens` tokens with padding or 4,096 if that is more.

    tokens: of the largest micro-batch in training, which needs more memory than a pass without gradients. multiple,
    limit: of padded lengths, see `padded_length`. The batches do not depend on the workers.
    """

    tokens: int = 0
    multiple: int = 8
    limit: int | None = None

    def of(self, lengths: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """The places of rows of these lengths, longest first, in batches. A worker computes whole batches."""
        places = sorted(range(len(lengths)), key=lambda place: -lengths[place])
        batches, first = [], 0
        while first < len(places):
            rows = max(self.tokens, _MOST_TOKENS) // self.padded(lengths[places[first]])
            batches.append(tuple(places[first : first + max(1, min(rows, _MOST_ROWS))]))
            first += len(batches[-1])
        return tuple(batches)

    def padded(self, length: int) -> int:
        """Tokens of each row of a batch whose longest row has `length`."""
        return padded_length(length, self.multiple, self.limit)

    def largest(self, lengths: Sequence[int]) -> Shape:
        """The shape with the most tokens among the batches of rows of these lengths, one or more."""
        shapes = [(len(batch), self.padded(lengths[batch[0]])) for batch in self.of(lengths)]
        return max(shapes, key=lambda shape: (shape[0] * shape[1], shape[1]))
