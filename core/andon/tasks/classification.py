"""Text classification.

The loss is the SUM over rows of w[label] * cross entropy in fp32 (seed S5); the step divides it once by the number of
rows of the global batch. torch's weighted mean would divide by the sum of the weights, and a model's own loss guesses
its kind from the dtype of the labels, so neither is used.
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
from andon.tasks.encoded import EncodedRows, RowOptions


class ClassificationTask(EncodedRows):
    """Rows with one class each. The outputs are logits [rows, classes]."""

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
        """labels: the class of each row. class_weights: w, one a class (None: all 1). names: of the classes.

        Raises `InputError` for unusable rows, as `EncodedRows`, and for class weights that are not finite and >= 0.
        """
        self.num_labels = self.width = num_labels
        self._names = tuple(names)
        super().__init__(tokens, labels, **options)
        weights = [1.0] * num_labels if class_weights is None else list(class_weights)
        found = ProblemList()
        if len(weights) != num_labels:
            found.add("class_weights", f"{len(weights)} weights for {num_labels} classes")
        for label, weight in enumerate(weights):
            if not math.isfinite(weight) or weight < 0:
                found.add("class_weights", f"weight {weight} of class {label} must be finite and not negative")
        found.raise_if_any()
        self._weights = {torch.device("cpu"): torch.tensor(weights, dtype=torch.float32)}

    def label_fault(self, label: int, tokens: Sequence[int]) -> str:
        known = isinstance(label, int) and not isinstance(label, bool) and 0 <= label < self.num_labels
        return (
            "" if known else f"label {label!r} is not one of the {self.num_labels} classes 0 to {self.num_labels - 1}"
        )

    def label_tensor(self, labels: Sequence[int]) -> torch.Tensor:
        return torch.tensor(list(labels), dtype=torch.int64)

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
        # Kept on each device: a copy from the host would wait for the device between a forward and its backward.
        if device not in self._weights:
            self._weights[device] = self._weights[torch.device("cpu")].to(device)
        weights = self._weights[device][labels]
        return nn.functional.cross_entropy(logits.float(), labels, reduction="none") * weights

    def learned(self, row: int) -> str:
        number = int(self._labels[row])
        return f"class {number} ({self._names[number]})" if self._names else f"class {number}"

    def scores_of(self, ids: Sequence[int], outputs: torch.Tensor) -> ClassificationScores:
        logits, labels = outputs.float(), self._labels[list(ids)]
        confusion = confusion_of(logits.argmax(dim=1), labels, self.num_labels)
        losses: list[float] = self.row_losses(logits, labels).double().tolist()
        positive = (logits[:, 1] - logits[:, 0]).tolist() if self.num_labels == 2 else None
        return scores(confusion, positive, labels.tolist() if positive is not None else None, losses)
