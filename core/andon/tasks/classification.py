"""Text classification as the step sees it: encoded rows to padded batches, batches to a loss sum.

The loss is the SUM over rows of w[label] * cross entropy in fp32 (seed S5); the step divides it once by the number of
rows of the global batch. torch's weighted mean would divide by the sum of the weights, and a model's own loss guesses
its kind from the dtype of the labels: neither is used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Unpack

import torch
from torch import nn

from andon.console.problems import ProblemList
from andon.metrics.confusion import confusion_of
from andon.metrics.scores import ClassificationScores, scores
from andon.model.batches import logits_of
from andon.step.task import Batch, LeafLoss
from andon.tasks.encoded import EncodedRows, RowOptions, check_rows


class ClassificationTask(EncodedRows):
    """Encoded rows and their labels; a row's id is its place in `tokens`. Its outputs are logits [rows, classes]."""

    def __init__(
        self,
        tokens: Sequence[Sequence[int]],
        labels: Sequence[int],
        *,
        num_labels: int,
        class_weights: Sequence[float] | None = None,
        names: Sequence[str] = (),
        **options: Unpack[RowOptions],
    ) -> None:
        """tokens, labels: parallel, one entry a row. class_weights: w, one a class (None: all 1). names: of the
        classes, for a reader.

        Raises `InputError` that names every row that `check_rows` refuses, or whose label is not a class.
        """
        self.num_labels = self.width = num_labels
        self._names = tuple(names)

        def fault(index: int) -> str:
            label = labels[index]
            known = isinstance(label, int) and not isinstance(label, bool) and 0 <= label < num_labels
            return "" if known else f"label {label!r} is not one of the {num_labels} classes 0 to {num_labels - 1}"

        check_rows(tokens, len(labels), fault, options)
        _check_weights(class_weights, num_labels)
        weights = [1.0] * num_labels if class_weights is None else list(class_weights)
        self._weights = {torch.device("cpu"): torch.tensor(weights, dtype=torch.float32)}
        self._classes = torch.tensor(list(labels), dtype=torch.int64)
        super().__init__(tokens, self._classes, **options)

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

    def learned(self, row: int) -> str:
        number = int(self._classes[row])
        return f"class {number} ({self._names[number]})" if self._names else f"class {number}"

    def scores_of(self, ids: Sequence[int], outputs: torch.Tensor) -> ClassificationScores:
        logits, labels = outputs.float(), self._classes[list(ids)]
        confusion = confusion_of(logits.argmax(dim=1), labels, self.num_labels)
        losses: list[float] = self.row_losses(logits, labels).double().tolist()
        positive = (logits[:, 1] - logits[:, 0]).tolist() if self.num_labels == 2 else None
        return scores(confusion, positive, labels.tolist() if positive is not None else None, losses)


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
