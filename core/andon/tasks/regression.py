"""A number of each text: the loss is the SUM over rows of the squared error, which the step divides by their count.

The error is the fp64 difference of the model's fp32 number and the target, so training and scoring use the same number.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from andon.data.labels import LARGEST_TARGET
from andon.metrics.numbers import RegressionScores, regression_scores
from andon.model.batches import logits_of
from andon.step.task import Batch, LeafLoss
from andon.tasks.encoded import EncodedRows


class RegressionTask(EncodedRows):
    """Rows with a target number each, for a model with one output.

    In a batch, `labels` are the bits of the numbers in fp64, so they reach the device and the digest unrounded.
    """

    output = "number"
    counts_right = False
    width = 1

    def label_fault(self, label: float, tokens: Sequence[int]) -> str:
        return "" if abs(label) <= LARGEST_TARGET else f"target {label!r} is no finite number of fp32"

    def label_tensor(self, labels: Sequence[float]) -> torch.Tensor:
        return torch.tensor(list(labels), dtype=torch.float64).view(torch.int64)

    def loss_sum(self, model: nn.Module, batch: Batch) -> LeafLoss:
        """Sum over the batch's rows of the squared error, in fp64. No number is right or wrong: `correct` is 0."""
        error = logits_of(model, batch)[:, 0].double() - batch["labels"].view(torch.float64)
        return LeafLoss(error.square().sum(), torch.zeros((), dtype=torch.int64, device=error.device))

    def learned(self, row: int) -> str:
        return f"number {float(self._labels[row].view(torch.float64)):g}"

    def scores_of(self, ids: Sequence[int], outputs: torch.Tensor) -> RegressionScores:
        return regression_scores(outputs[:, 0].tolist(), self._labels[list(ids)].view(torch.float64).tolist())
