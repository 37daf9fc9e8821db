"""What the step needs of a task: rows to tensors, tensors to a loss sum. Any module and any loss will do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

Batch = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class LeafLoss:
    """The loss of one micro-batch.

    loss_sum: scalar, the SUM over its rows (weights applied, divided by nothing), with its graph. correct: scalar
    int64, terms that were predicted right. terms: scalar int64, terms of the sum; None: one per row.
    """

    loss_sum: torch.Tensor
    correct: torch.Tensor
    terms: torch.Tensor | None = None


class Task(Protocol):
    """Rows and their loss. The global batch's gradient is d(sum of loss sums) / d(weights) / terms of the batch."""

    def load(self, ids: Sequence[int], device: torch.device) -> Batch:
        """The collated rows `ids` (at least one) on `device`; the first dimension of every tensor is the rows."""
        ...

    def loss_sum(self, model: nn.Module, batch: Batch) -> LeafLoss:
        """Forward and loss of one micro-batch."""
        ...

    def content(self, batch: Batch) -> torch.Tensor:
        """int64 [rows]: a digest of each row as the model receives it, without padding."""
        ...

    def planned_content(self, ids: Sequence[int]) -> torch.Tensor:
        """int64 [rows]: the digests that `content` must give for these rows."""
        ...

    def planned_terms(self, ids: Sequence[int]) -> Sequence[int]:
        """For each of these rows, its terms of the loss sum: 1 if a row is one term."""
        ...
