"""Scores of sets of labels, from integer counts: the same floats on any number of workers and in any order of rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from andon.metrics.scores import ClassScores, WithoutMatrix, class_scores


@dataclass(frozen=True)
class MultiLabelScores(WithoutMatrix):
    """Scores of labels over `rows` rows.

    subset_accuracy: share of rows whose labels are all right. micro_f1: over all labels together, macro_f1: plain mean
    over the labels, also those without rows. A score with denominator zero is 0.0. loss: mean over rows and labels.
    """

    rows: int
    subset_accuracy: float
    micro_f1: float
    macro_f1: float
    classes: tuple[ClassScores, ...]
    loss: float | None


def multi_label_scores(predicted: torch.Tensor, actual: torch.Tensor, losses: Sequence[float]) -> MultiLabelScores:
    """Scores of two bool [rows, labels] tables. losses: one for each row and label, in any order.

    Raises `ValueError` for different shapes.
    """
    if predicted.shape != actual.shape or predicted.dim() != 2:
        msg = f"predictions {tuple(predicted.shape)} and labels {tuple(actual.shape)} must be two tables of one shape"
        raise ValueError(msg)
    right, guessed, wanted = (
        [int(count) for count in table.sum(dim=0)] for table in (predicted & actual, predicted, actual)
    )
    classes = tuple(map(class_scores, right, guessed, wanted))
    whole = class_scores(sum(right), sum(guessed), sum(wanted))
    rows = len(predicted)
    return MultiLabelScores(
        rows=rows,
        subset_accuracy=int((predicted == actual).all(dim=1).sum()) / max(rows, 1),
        micro_f1=whole.f1,
        macro_f1=math.fsum(one.f1 for one in classes) / max(len(classes), 1),
        classes=classes,
        loss=math.fsum(losses) / max(len(losses), 1),
    )
