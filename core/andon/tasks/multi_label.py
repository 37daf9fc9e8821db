"""Several labels of each text, or none: each label is a separate yes or no with its own term of the loss.

The loss is the SUM over rows and labels of the binary cross entropy of a logit, in fp32; it has rows * labels
terms, so the step divides by the same count as torch's BCEWithLogitsLoss for its mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import torch
from torch import nn

from andon.metrics.label_sets import MultiLabelScores, multi_label_scores
from andon.model.batches import logits_of
from andon.step.task import Batch, LeafLoss
from andon.tasks.encoded import EncodedRows, RowOptions


class MultiLabelTask(EncodedRows):
    """Rows with any number of labels each, in a batch as 0 and 1. The outputs are logits [rows, labels].

    A label is predicted if its probability is above 0.5, so if its logit is above 0.
    """

    def __init__(
        self,
        tokens: Sequence[Sequence[int]],
        labels: Sequence[Sequence[int]],
        *,
        num_labels: int,
        names: Sequence[str] = (),
        **options: Unpack[RowOptions],
    ) -> None:
        """labels: the label numbers of each row. names: of the labels. Raises `InputError` as `EncodedRows` does."""
        self.width = num_labels
        self._names = tuple(names)
        super().__init__(tokens, labels, **options)

    def label_fault(self, label: Sequence[int], tokens: Sequence[int]) -> str:
        odd = next((number for number in label if not 0 <= number < self.width), None)
        return "" if odd is None else f"label {odd!r} is not one of the {self.width} labels 0 to {self.width - 1}"

    def label_tensor(self, labels: Sequence[Sequence[int]]) -> torch.Tensor:
        wanted = torch.zeros((len(labels), self.width), dtype=torch.int64)
        for row, numbers in enumerate(labels):
            wanted[row, list(numbers)] = 1
        return wanted

    def planned_terms(self, ids: Sequence[int]) -> Sequence[int]:
        return (self.width,) * len(ids)

    def loss_sum(self, model: nn.Module, batch: Batch) -> LeafLoss:
        """Sum over rows and labels of the binary cross entropy, in fp32, and how many labels are predicted right."""
        logits = logits_of(model, batch)
        wanted = batch["labels"]
        right = ((logits.detach() > 0) == (wanted == 1)).sum()
        return LeafLoss(_losses(logits, wanted).sum(), right, torch.full_like(right, wanted.numel()))

    def learned(self, row: int) -> str:
        numbers = self._labels[row].nonzero().flatten().tolist()
        return f"labels {numbers}" + (f" ({', '.join(self._names[each] for each in numbers)})" if self._names else "")

    def scores_of(self, ids: Sequence[int], outputs: torch.Tensor) -> MultiLabelScores:
        wanted = self._labels[list(ids)]
        losses: list[float] = _losses(outputs.float(), wanted).double().flatten().tolist()
        return multi_label_scores(outputs > 0, wanted == 1, losses)


def _losses(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """fp32 [rows, labels]. Their exact sum (`math.fsum`) is the same in any order of rows."""
    logits = logits.float()
    return nn.functional.binary_cross_entropy_with_logits(logits, wanted.to(logits.dtype), reduction="none")
