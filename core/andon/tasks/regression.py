"""A number of each text: the loss is the SUM over rows of the squared error, which the step divides by their count.

The error is taken in fp64, between the model's fp32 number and the row's own, so that what is trained on and what is
scored are the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import torch
from torch import nn

from andon.data.labels import LARGEST_TARGET
from andon.metrics.numbers import RegressionScores, regression_scores
from andon.model.batches import logits_of
from andon.step.task import Batch, LeafLoss
from andon.tasks.encoded import EncodedRows, RowOptions, check_rows


class RegressionTask(EncodedRows):
    """Encoded rows and a number for each, by a model of one output.

    In a batch, `labels` are the bits of the numbers in fp64, so that they travel, and are digested, as they are.
    """

    output = "number"
    counts_right = False
    width = 1

    def __init__(
        self, tokens: Sequence[Sequence[int]], targets: Sequence[float], **options: Unpack[RowOptions]
    ) -> None:
        """tokens, targets: parallel, one entry a row.

        Raises `InputError` that names, by `places`, every row that `check_rows` refuses, or whose target is not finite
        in fp32.
        """

        def fault(index: int) -> str:
            fits = abs(targets[index]) <= LARGEST_TARGET
            return "" if fits else f"target {targets[index]!r} is no finite number of fp32"

        check_rows(tokens, len(targets), fault, options)
        self._targets = torch.tensor(list(targets), dtype=torch.float64)
        super().__init__(tokens, self._targets.view(torch.int64), **options)

    def loss_sum(self, model: nn.Module, batch: Batch) -> LeafLoss:
        """Sum over the batch's rows of the squared error, in fp64. No number is right or wrong: `correct` is 0."""
        error = logits_of(model, batch)[:, 0].double() - batch["labels"].view(torch.float64)
        return LeafLoss(error.square().sum(), torch.zeros((), dtype=torch.int64, device=error.device))

    def learned(self, row: int) -> str:
        return f"number {float(self._targets[row]):g}"

    def scores_of(self, ids: Sequence[int], outputs: torch.Tensor) -> RegressionScores:
        return regression_scores(outputs[:, 0].tolist(), self._targets[list(ids)].tolist())
