"""Text classification as the step sees it: encoded rows to padded batches, batches to a loss sum.

Rows are encoded once, before training (seed S2, C-PRETOK-001). A batch is padded to its own longest row, so its shape
depends on its rows alone and not on who computes it. The loss is the SUM over rows of w[label] * cross entropy in
fp32 (seed S5); the step divides it once by the number of rows of the global batch. torch's weighted mean would divide
by the sum of the weights, and a model's own loss guesses its kind from the dtype of the labels: neither is used.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence

import torch
from torch import nn

from andon.console.problems import ProblemList
from andon.model.build import computing
from andon.model.masks import masked, masking_of
from andon.step.task import Batch, LeafLoss
from andon_contracts.digest import row_digests

_TABLE_ROWS = 512
Shape = tuple[int, int]
"""Rows and padded length of a micro-batch."""


class ClassificationTask:
    """Encoded rows and their labels; a row's id is its place in `tokens`. A `Task` of the step."""

    def __init__(
        self,
        tokens: Sequence[Sequence[int]],
        labels: Sequence[int],
        *,
        num_labels: int,
        vocab_size: int,
        pad_id: int,
        class_weights: Sequence[float] | None = None,
        padding_multiple: int = 8,
        max_length: int | None = None,
        places: Sequence[str] | None = None,
    ) -> None:
        """tokens, labels: parallel, one entry a row. class_weights: w, one a class (None: all 1). padding_multiple:
        batches are padded to a multiple of this, but never beyond max_length. places: where each row came from
        (`train.csv:17`), for messages.

        Raises `InputError` that names every row with no tokens or more than max_length, ids outside of the
        vocabulary, padding at its end (a decoder would pool an earlier token), or a label that is not a class.
        """
        self.num_labels = num_labels
        self.pad_id = pad_id
        self._multiple = padding_multiple
        self._limit = max_length
        _check_rows(tokens, labels, places, num_labels, vocab_size, pad_id, max_length)
        _check_weights(class_weights, num_labels)
        self._lengths = torch.tensor([len(row) for row in tokens], dtype=torch.int64)
        self._starts = (torch.cumsum(self._lengths, 0) - self._lengths).tolist()
        self._tokens = torch.tensor(list(itertools.chain.from_iterable(tokens)), dtype=torch.int64)
        self._labels = torch.tensor(list(labels), dtype=torch.int64)
        weights = [1.0] * num_labels if class_weights is None else list(class_weights)
        self._weights = {torch.device("cpu"): torch.tensor(weights, dtype=torch.float32)}
        self._table = self._digest_rows()

    def __len__(self) -> int:
        return self._labels.numel()

    @property
    def lengths(self) -> torch.Tensor:
        """int64 [rows]: tokens of each row."""
        return self._lengths

    def load(self, ids: Sequence[int], device: torch.device) -> Batch:
        """Rows `ids`, one or more, on `device`: input_ids and attention_mask [rows, length], labels [rows], all int64.

        Padded on the right with pad_id, mask 0 there. Raises `ValueError` without ids, `IndexError` for unknown ones.
        """
        if not ids:
            raise ValueError("a batch needs at least one row")
        count = self._labels.numel()
        if min(ids) < 0 or max(ids) >= count:
            msg = f"rows {min(ids)} to {max(ids)} asked of a task with {count} rows"
            raise IndexError(msg)
        starts = [self._starts[row] for row in ids]
        rows = [self._tokens[start : start + int(self._lengths[row])] for row, start in zip(ids, starts, strict=True)]
        batch = collate(rows, self.pad_id, self._multiple, self._limit)
        batch["labels"] = self._labels[list(ids)]
        return placed(batch, device)

    def loss_sum(self, model: nn.Module, batch: Batch) -> LeafLoss:
        """Sum over the batch's rows of w[label] * cross entropy, in fp32, and the rows whose argmax is the label."""
        logits = logits_of(model, batch)
        labels = batch["labels"]
        return LeafLoss(
            loss_sum=self.row_losses(logits, labels).sum(),
            correct=(logits.detach().argmax(dim=1) == labels).sum(),
        )

    def row_losses(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """fp32 [rows]: w[label] * cross entropy. Their exact sum (`math.fsum`) is the same in any order of rows."""
        device = logits.device
        # A copy from the host waits for the device, and this is between a forward and its backward.
        if device not in self._weights:
            self._weights[device] = self._weights[torch.device("cpu")].to(device)
        weights = self._weights[device][labels]
        return nn.functional.cross_entropy(logits.float(), labels, reduction="none") * weights

    def content(self, batch: Batch) -> torch.Tensor:
        """int64 [rows]: the digest of each row's tokens, mask and label as the batch holds them, padding aside.

        Label and mask enter with the tokens: a row is (label, 2 * id + mask, ...), as long as its mask says.
        """
        mask = batch["attention_mask"]
        values = torch.cat([batch["labels"].unsqueeze(1), batch["input_ids"] * 2 + mask], dim=1)
        return row_digests(values, mask.sum(dim=1) + 1)

    def planned_content(self, ids: Sequence[int]) -> torch.Tensor:
        """int64 [len(ids)] on the CPU: what `content` must give for these rows, computed when the task was made."""
        return self._table[list(ids)]

    def labels_of(self, ids: Sequence[int]) -> torch.Tensor:
        """int64 [len(ids)] on the CPU: the classes of these rows."""
        return self._labels[list(ids)]

    def _digest_rows(self) -> torch.Tensor:
        table = torch.zeros(len(self), dtype=torch.int64)
        for first in range(0, len(self), _TABLE_ROWS):
            lengths = self._lengths[first : first + _TABLE_ROWS]
            real = torch.arange(int(lengths.max())) < lengths.unsqueeze(1)
            start = self._starts[first]
            values = torch.zeros(real.shape, dtype=torch.int64)
            values[real] = self._tokens[start : start + int(lengths.sum())]
            labels = self._labels[first : first + _TABLE_ROWS]
            table[first : first + _TABLE_ROWS] = self.content(
                {"input_ids": values, "attention_mask": real, "labels": labels}
            )
        return table


def padded_length(longest: int, multiple: int, limit: int | None = None) -> int:
    """Tokens to which rows of at most `longest` are padded: up to a multiple, and beyond `limit` only as they are."""
    length = -(-longest // multiple) * multiple
    return length if limit is None else max(longest, min(length, limit))


def shapes_of(batch_size: int, micro_batches: int, lengths: Collection[int]) -> frozenset[Shape]:
    """The shapes of full global batches: one or two numbers of rows, each of `lengths`."""
    rows = {batch_size // micro_batches, -(-batch_size // micro_batches)} - {0}
    return frozenset((count, length) for count in rows for length in lengths)


def length_step(max_length: int, count: int, multiple: int = 8) -> int:
    """The multiple to pad to so that there are at most `count` lengths up to `max_length`; itself one of `multiple`."""
    return padded_length(-(-max_length // count), multiple)


def padded_lengths(max_length: int, step: int) -> tuple[int, ...]:
    """The lengths to which rows of at most `max_length` tokens are padded."""
    return tuple(padded_length(length, step, max_length) for length in range(1, max_length + 1, step))


def collate(
    rows: Sequence[torch.Tensor], pad_id: int, multiple: int, limit: int | None = None
) -> dict[str, torch.Tensor]:
    """Rows (int64 vectors, none empty) padded on the right: input_ids and attention_mask, int64 [rows, length].

    length: that of the longest row, rounded up to `multiple` but not beyond `limit`.
    """
    length = padded_length(max(row.numel() for row in rows), multiple, limit)
    ids = torch.full((len(rows), length), pad_id, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for place, row in enumerate(rows):
        ids[place, : row.numel()] = row
        mask[place, : row.numel()] = 1
    return {"input_ids": ids, "attention_mask": mask}


def placed(batch: Batch, device: torch.device) -> dict[str, torch.Tensor]:
    """int64 tensors on `device`; a GPU gets them in one copy from pinned memory that nobody waits for."""
    if device.type != "cuda":
        return {name: tensor.to(device) for name, tensor in batch.items()}
    joined = torch.cat([tensor.flatten() for tensor in batch.values()]).pin_memory().to(device, non_blocking=True)
    parts = torch.split(joined, [tensor.numel() for tensor in batch.values()])
    return {name: part.view(tensor.shape) for (name, tensor), part in zip(batch.items(), parts, strict=True)}


def logits_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    """[rows, classes]: one forward pass, without the labels, so that the model computes no loss of its own.

    A model whose weights are stored in half precision computes its matrix products in it (autocast).
    """
    ids = batch["input_ids"]
    masking = masking_of(model, ids.device)
    with computing(model, ids.device), masked(model, masking, batch["attention_mask"]) as mask:
        logits: torch.Tensor = model(input_ids=ids, attention_mask=mask).logits
    return logits


def predictions(model: nn.Module, batch: Batch) -> torch.Tensor:
    """fp32 [rows, classes] logits in eval mode and without a graph; the model's mode is as before afterwards."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            return logits_of(model, batch).float()
    finally:
        model.train(training)


def evaluation_batches(count: int, rows: int) -> tuple[range, ...]:
    """Rows 0 to count - 1 in order, in batches of `rows`: each row once, whatever the number of workers.

    Workers share whole batches, so every batch is computed with one shape. Raises `ValueError` for count < 0, rows < 1.
    """
    if count < 0 or rows < 1:
        msg = f"cannot split {count} rows into batches of {rows}"
        raise ValueError(msg)
    return tuple(range(first, min(first + rows, count)) for first in range(0, count, rows))


def _check_rows(
    tokens: Sequence[Sequence[int]],
    labels: Sequence[int],
    places: Sequence[str] | None,
    num_labels: int,
    vocab_size: int,
    pad_id: int,
    max_length: int | None,
) -> None:
    found = ProblemList()
    if len(tokens) != len(labels):
        found.add("", f"{len(tokens)} rows of tokens but {len(labels)} labels")
        found.raise_if_any()
    for index, (row, label) in enumerate(zip(tokens, labels, strict=True)):
        where = places[index] if places is not None else f"row {index}"
        if isinstance(label, bool) or not isinstance(label, int) or not 0 <= label < num_labels:
            found.add(where, f"label {label!r} is not one of the {num_labels} classes 0 to {num_labels - 1}")
        fault = _token_fault(row, vocab_size, pad_id, max_length)
        if fault:
            found.add(where, fault)
    found.raise_if_any()


def _token_fault(row: Sequence[int], vocab_size: int, pad_id: int, max_length: int | None) -> str:
    if not row:
        return "the text gives no tokens"
    if max_length is not None and len(row) > max_length:
        return f"{len(row)} tokens are more than max_length {max_length}"
    lowest, highest = min(row), max(row)
    if lowest < 0 or highest >= vocab_size:
        wrong = lowest if lowest < 0 else highest
        return f"token id {wrong} is outside of the vocabulary of {vocab_size} ids"
    if row[-1] == pad_id:
        return f"the text ends with the padding token (id {pad_id}); a model would take it for padding"
    return ""


def _check_weights(weights: Sequence[float] | None, num_labels: int) -> None:
    if weights is None:
        return
    found = ProblemList()
    if len(weights) != num_labels:
        found.add("class_weights", f"{len(weights)} weights for {num_labels} classes")
    for label, weight in enumerate(weights):
        if not math.isfinite(weight) or weight < 0:
            found.add("class_weights", f"weight {weight} of class {label} must be finite and not negative")
    found.raise_if_any()
