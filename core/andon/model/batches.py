"""Batches of rows: padding, copies to the device, and the forward pass of classifiers.

A batch is padded to its longest row, so its shape depends on its rows and not on the rank that computes it.
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
    """The shapes of micro-batches of a full global batch: its one or two row counts, with each of `lengths`."""
    rows = {batch_size // micro_batches, -(-batch_size // micro_batches)} - {0}
    return frozenset((count, length) for count in rows for length in lengths)


def length_step(max_length: int, count: int, multiple: int = 8) -> int:
    """The padding step, a multiple of `multiple`, that gives at most `count` padded lengths up to `max_length`."""
    return padded_length(-(-max_length // count), multiple)


def padded_lengths(max_length: int, step: int) -> tuple[int, ...]:
    """All padded lengths of rows of up to `max_length` tokens, for padding to multiples of `step`."""
    return tuple(padded_length(length, step, max_length) for length in range(1, max_length + 1, step))


def collate(rows: Sequence[Tensor], pad_id: int, multiple: int, limit: int | None = None) -> dict[str, Tensor]:
    """Pad `rows` (integer vectors, not empty) on the right: input_ids and attention_mask, int64 [rows, length].
    length: the longest row's, rounded up to `multiple` but not beyond `limit`."""
    lengths = torch.tensor([row.numel() for row in rows])
    length = padded_length(int(lengths.max()), multiple, limit)
    ids = nn.utils.rnn.pad_sequence([*rows], batch_first=True, padding_value=pad_id)
    ids = nn.functional.pad(ids, (0, length - ids.shape[1]), value=pad_id).long()
    return {"input_ids": ids, "attention_mask": (torch.arange(length) < lengths[:, None]).long()}


def placed(batch: Batch, device: torch.device) -> dict[str, Tensor]:
    """The batch's int64 tensors on `device`. A GPU gets them in one asynchronous copy from pinned memory."""
    if device.type != "cuda":
        return {name: tensor.to(device) for name, tensor in batch.items()}
    joined = torch.cat([tensor.flatten() for tensor in batch.values()]).pin_memory().to(device, non_blocking=True)
    parts = torch.split(joined, [tensor.numel() for tensor in batch.values()])
    return {name: part.view(tensor.shape) for (name, tensor), part in zip(batch.items(), parts, strict=True)}


def logits_of(model: nn.Module, batch: Batch) -> Tensor:
    """[rows, classes], or [rows, length, classes] by token: one forward pass in the weights' precision (autocast)."""
    device, names = batch["input_ids"].device, ["input_ids", "attention_mask"]
    if "token_type_ids" in batch:
        base = without_adapter(model)
        has_types = getattr(getattr(base, "config", None), "type_vocab_size", 2) > 1
        if has_types and "token_type_ids" in inspect.signature(type(base).forward).parameters:
            names.append("token_type_ids")
    inputs = {name: batch[name] for name in names}
    on_left = padding_of(model, device).side == "left"
    if on_left:
        shift = batch["attention_mask"].sum(dim=1)
        inputs = {name: rotate_rows(values, shift) for name, values in inputs.items()}
    masking = Masking.TOKENS if on_left else masking_of(model, device)
    with computing(model, device), masked(model, masking, inputs.pop("attention_mask")) as mask:
        logits: Tensor = model(attention_mask=mask, **inputs).logits
    return rotate_rows(logits, -shift) if on_left and logits.dim() == 3 else logits


def predictions(model: nn.Module, batch: Batch) -> Tensor:
    """`logits_of` in evaluation mode and fp32, without a graph."""
    with evaluating(model, batch["input_ids"].device):
        return logits_of(model, batch).float()


@dataclass(frozen=True)
class EvaluationBatching:
    """Splits rows into evaluation batches of at most 64 rows and max(`tokens`, 4,096) tokens with padding.

    tokens: padded tokens of the largest training micro-batch, which needs more memory than a pass without gradients.
    multiple, limit: see `padded_length`. The batches do not depend on the number of workers.
    """

    tokens: int = 0
    multiple: int = 8
    limit: int | None = None

    def of(self, lengths: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Indices of rows of these lengths, longest first, in batches. One rank computes a whole batch."""
        places = sorted(range(len(lengths)), key=lambda place: -lengths[place])
        batches, first = [], 0
        while first < len(places):
            rows = max(self.tokens, _MOST_TOKENS) // self.padded(lengths[places[first]])
            batches.append(tuple(places[first : first + max(1, min(rows, _MOST_ROWS))]))
            first += len(batches[-1])
        return tuple(batches)

    def padded(self, length: int) -> int:
        """The padded length of a batch whose longest row has `length` tokens."""
        return padded_length(length, self.multiple, self.limit)

    def largest(self, lengths: Sequence[int]) -> Shape:
        """The shape with the most padded tokens among the batches of rows of these lengths (at least one)."""
        shapes = [(len(batch), self.padded(lengths[batch[0]])) for batch in self.of(lengths)]
        return max(shapes, key=lambda shape: (shape[0] * shape[1], shape[1]))
