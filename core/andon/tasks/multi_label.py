"""Several labels of each text, or none: each label is a yes or no of its own, with a term of the loss.

The loss is the SUM over rows and labels of the binary cross entropy of a logit, in fp32; its terms are rows times
labels, so that what the step divides by is what torch's BCEWithLogitsLoss divides by for its mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import torch
from torch import nn

from andon.metrics.label_sets import MultiLabelScores, multi_label_scores
from andon.model.batches import logits_of
from andon.step.task import Batch, LeafLoss
from andon.tasks.encoded import EncodedRows, RowOptions, check_rows


class MultiLabelTask(EncodedRows):
    """Encoded rows and the labels of each, in a batch as 0 and 1; the outputs are logits [rows, labels]. A label is
    predicted where its probability is above 0.5, so where its logit is above 0."""

    def __init__(
        self,
        tokens: Sequence[Sequence[int]],
        labels: Sequence[Sequence[int]],
        *,
        num_labels: int,
        names: Sequence[str] = (),
        **options: Unpack[RowOptions],
    ) -> None:
        """tokens, labels: parallel, one entry a row; of labels their numbers. names: of the labels, for a reader.

        Raises `InputError` that names, by `places`, every row that `check_rows` refuses, or with a label that is none.
        """
        self.width = num_labels
        self._names = tuple(names)

        def fault(index: int) -> str:
            odd = next((label for label in labels[index] if not 0 <= label < num_labels), None)
            return "" if odd is None else f"label {odd!r} is not one of the {num_labels} labels 0 to {num_labels - 1}"

        check_rows(tokens, len(labels), fault, options)
        self._wanted = torch.zeros((len(labels), num_labels), dtype=torch.int64)
        for row, numbers in enumerate(labels):
            self._wanted[row, list(numbers)] = 1
        super().__init__(tokens, self._wanted, **options)

    def planned_terms(self, ids: Sequence[int]) -> Sequence[int]:
        return (self.width,) * len(ids)

    def loss_sum(self, model: nn.Module, batch: Batch) -> LeafLoss:
        """Sum over rows and labels of the binary cross entropy, in fp32, and how many of them are predicted right."""
        logits = logits_of(model, batch)
        wanted = batch["labels"]
        right = ((logits.detach() > 0) == (wanted == 1)).sum()
        return LeafLoss(_losses(logits, wanted).sum(), right, torch.full_like(right, wanted.numel()))

    def learned(self, row: int) -> str:
        numbers = self._wanted[row].nonzero().flatten().tolist()
        return f"labels {numbers}" + (f" ({', '.join(self._names[each] for each in numbers)})" if self._names else "")

    def scores_of(self, ids: Sequence[int], outputs: torch.Tensor) -> MultiLabelScores:
        wanted = self._wanted[list(ids)]
        losses: list[float] = _losses(outputs.float(), wanted).double().flatten().tolist()
        return multi_label_scores(outputs > 0, wanted == 1, losses)


def _losses(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """fp32 [rows, labels]. Their exact sum (`math.fsum`) is the same in any order of rows."""
    logits = logits.float()
    return nn.functional.binary_cross_entropy_with_logits(logits, wanted.to(logits.dtype), reduction="none")
