"""Text classification as the step sees it: encoded rows to padded batches, batches to a loss sum.

Rows are encoded once, before training (seed S2, C-PRETOK-001). The loss is the SUM over rows of w[label] * cross
entropy in fp32 (seed S5); the step divides it once by the number of rows of the global batch. torch's weighted mean
would divide by the sum of the weights, and a model's own loss guesses its kind from the dtype of the labels: neither is
used.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from andon.console.problems import ProblemList
from andon.data.tokens import Tokenizer
from andon.metrics.scores import ClassificationScores, confusion_matrix, scores
from andon.model.batches import collate, logits_of, placed, predictions
from andon.step.task import Batch, LeafLoss
from andon_contracts.digest import row_digests

_TABLE_ROWS = 512


class ClassificationTask:
    """Encoded rows and their labels; a row's id is its place in `tokens`. Its outputs are logits [rows, classes]."""

    output = "logits"
    notes: tuple[str, ...] = ()

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

    def planned_terms(self, ids: Sequence[int]) -> Sequence[int]:
        """One for each row: a row is one term of the loss, whatever its weight."""
        return (1,) * len(ids)

    @property
    def width(self) -> int:
        """Logits of a row: one a class."""
        return self.num_labels

    def shown(self, row: int, tokenizer: Tokenizer) -> Iterator[str]:
        """The row's class, and a line for each token: its place, its id, what it says."""
        yield f"row {row}: {int(self._lengths[row])} tokens, class {int(self._labels[row])}"
        start = self._starts[row]
        for place, id_ in enumerate(self._tokens[start : start + int(self._lengths[row])].tolist()):
            yield f"{place:6} {id_:7}  {tokenizer.shown(id_)}"

    def require_fit(self, model: nn.Module, device: torch.device) -> None:
        """Any model that was built for these classes can be given these rows."""

    def outputs(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """fp32 [rows, classes] logits in eval mode and without a graph."""
        return predictions(model, batch)

    def score(self, ids: Sequence[int], outputs: torch.Tensor) -> ClassificationScores:
        """The scores of these rows by their logits, fp64 [rows, classes] on the CPU."""
        logits, labels = outputs.float(), self._labels[list(ids)]
        confusion = confusion_matrix(logits.argmax(dim=1), labels, self.num_labels)
        losses: list[float] = self.row_losses(logits, labels).double().tolist()
        positive = (logits[:, 1] - logits[:, 0]).tolist() if self.num_labels == 2 else None
        return scores(confusion, positive, labels.tolist() if positive is not None else None, losses)

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
