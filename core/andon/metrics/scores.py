"""Scores from exact counts: the same floats on any number of workers and in any order of rows.

Counts are integers, and every sum of floats is rounded once (`math.fsum`). If a denominator is zero, the score is 0.0
(scikit-learn's zero_division=0): precision of a class never predicted, recall of a class without rows, F1 of a class
with neither, MCC when all rows or all predictions are of one class, accuracy of no rows. AUROC is None without a row of
each class, and a correlation is None if all predictions or all targets are equal.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from andon.metrics.confusion import Confusion

if TYPE_CHECKING:
    import torch


class Scores:
    """Scores of an evaluation over `rows` rows, of any task.

    loss: mean over the loss terms; None if unknown. confusion: None for a task that predicts no single class.
    """

    rows: int
    loss: float | None
    confusion: Confusion | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        found: dict[str, Any] = asdict(self)  # type: ignore[call-overload]
        return found


@dataclass(frozen=True)
class SourcedScores(Scores):
    """The scores of all rows, and of the rows of each source."""

    whole: Scores
    sources: Mapping[str, Scores]

    def __post_init__(self) -> None:
        for name in ("rows", "loss", "confusion"):
            object.__setattr__(self, name, getattr(self.whole, name))

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON: the scores of all rows, and the numbers among those of each source."""
        numbers = {
            name: {key: value for key, value in each.as_dict().items() if isinstance(value, int | float)}
            for name, each in self.sources.items()
        }
        return self.whole.as_dict() | {"sources": numbers}


@dataclass(frozen=True)
class ClassScores:
    """Scores of one class in [0, 1], and its number of rows (`support`)."""

    precision: float
    recall: float
    f1: float
    support: int


def class_scores(right: int, predicted: int, actual: int) -> ClassScores:
    """The scores of one class from its counts of right predictions, predictions and rows."""
    return ClassScores(
        _ratio(right, predicted), _ratio(right, actual), _ratio(2 * right, predicted + actual), support=actual
    )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


@dataclass(frozen=True)
class ClassificationScores(Scores):
    """Scores of classes over `rows` rows.

    macro_f1: plain mean of F1 over all classes, those without rows too. mcc: multi-class Matthews coefficient (Gorodkin
    2004), in [-1, 1]. auroc: of class 1, two classes only. loss: mean over rows.
    """

    rows: int
    accuracy: float
    macro_f1: float
    mcc: float
    classes: tuple[ClassScores, ...]
    confusion: Confusion
    auroc: float | None = None
    loss: float | None = None


def scores(
    confusion: Confusion,
    positive_scores: Sequence[float] | None = None,
    labels: Sequence[int] = (),
    row_losses: Sequence[float] | None = None,
) -> ClassificationScores:
    """Scores of a confusion matrix.

    positive_scores and labels (0 or 1), one a row in one order, give the AUROC of class 1 (any score that grows with
    the class will do); only for two classes. row_losses, one a row, give the loss.
    """
    actual, predicted, right = ([0] * confusion.classes for _ in range(3))
    for true, guess, count in confusion.cells:
        actual[true] += count
        predicted[guess] += count
        right[true] += count if true == guess else 0
    rows, hits = sum(actual), sum(right)
    classes = tuple(map(class_scores, right, predicted, actual))
    covariance = hits * rows - sum(a * p for a, p in zip(actual, predicted, strict=True))
    spreads = [rows * rows - sum(count * count for count in counts) for counts in (actual, predicted)]
    return ClassificationScores(
        rows=rows,
        accuracy=_ratio(hits, rows),
        macro_f1=math.fsum(one.f1 for one in classes) / len(classes),
        # Squared in integers, so that it is rounded once and never leaves [-1, 1].
        mcc=math.copysign(math.sqrt(_ratio(covariance * covariance, spreads[0] * spreads[1])), covariance),
        classes=classes,
        confusion=confusion,
        auroc=None if positive_scores is None else auroc(positive_scores, labels),
        loss=None if row_losses is None else _ratio(math.fsum(row_losses), rows),
    )


def auroc(positive_scores: Sequence[float], labels: Sequence[int]) -> float | None:
    """The chance that a row of class 1 scores above one of class 0, ties counting half (Mann and Whitney 1947).

    Counted in integers over the sorted scores. None without a row of each class. Raises `ValueError` for lists of
    different lengths, labels other than 0 and 1, and NaN.
    """
    if any(label not in (0, 1) for label in labels) or any(map(math.isnan, positive_scores)):
        raise ValueError("a label is not 0 or 1, or a score is NaN")
    pairs = list(zip(positive_scores, labels, strict=True))
    positive = [score for score, label in pairs if label == 1]
    negative = sorted(score for score, label in pairs if label == 0)
    if not positive or not negative:
        return None
    doubled = sum(bisect_left(negative, score) + bisect_right(negative, score) for score in positive)
    return doubled / (2 * len(positive) * len(negative))


@dataclass(frozen=True)
class MultiLabelScores(Scores):
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
    """Scores of two bool [rows, labels] tables. losses: one for each row and label, in any order."""
    right, guessed, wanted = (
        [int(count) for count in table.sum(dim=0)] for table in (predicted & actual, predicted, actual)
    )
    classes = tuple(map(class_scores, right, guessed, wanted))
    return MultiLabelScores(
        rows=len(predicted),
        subset_accuracy=int((predicted == actual).all(dim=1).sum()) / max(len(predicted), 1),
        micro_f1=class_scores(sum(right), sum(guessed), sum(wanted)).f1,
        macro_f1=math.fsum(one.f1 for one in classes) / max(len(classes), 1),
        classes=classes,
        loss=math.fsum(losses) / max(len(losses), 1),
    )


@dataclass(frozen=True)
class RegressionScores(Scores):
    """Scores of numbers over `rows` rows.

    mae, rmse: mean absolute error and root mean squared error, in the unit of the targets. pearson: the correlation,
    spearman: the correlation of the ranks, ties with their mean rank; both in [-1, 1]. loss: the mean squared error.
    """

    rows: int
    mae: float
    rmse: float
    pearson: float | None
    spearman: float | None
    loss: float | None


def regression_scores(predicted: Sequence[float], actual: Sequence[float]) -> RegressionScores:
    """Scores of one prediction and one target for each row. Errors of no rows are 0.0.

    Raises `ValueError` for lists of different lengths and for numbers that are not finite.
    """
    if not all(map(math.isfinite, (*predicted, *actual))):
        raise ValueError("a prediction or a target is not finite")
    errors = [guess - target for guess, target in zip(predicted, actual, strict=True)]
    count = max(len(errors), 1)
    squared = math.fsum(error * error for error in errors) / count
    mae, rmse = math.fsum(map(abs, errors)) / count, math.sqrt(squared)
    return RegressionScores(len(errors), mae, rmse, pearson(predicted, actual), spearman(predicted, actual), squared)


def pearson(first: Sequence[float], second: Sequence[float]) -> float | None:
    """The correlation of two lists of one length, in [-1, 1]; None if a list is constant."""
    deviations = []
    for values in (first, second):
        low, high = min(values, default=0.0), max(values, default=0.0)
        if low == high:
            return None
        scaled = [(value - low) / (high - low) for value in values]  # so that no square underflows
        mean = math.fsum(scaled) / len(scaled)
        deviations.append([value - mean for value in scaled])
    one, other = deviations
    covariance = math.fsum(a * b for a, b in zip(one, other, strict=True))
    spread = math.sqrt(math.fsum(a * a for a in one)) * math.sqrt(math.fsum(b * b for b in other))
    return max(-1.0, min(1.0, covariance / spread))


def spearman(first: Sequence[float], second: Sequence[float]) -> float | None:
    """The correlation of the ranks of two lists of one length, in integers; None if a list is constant."""
    # Twice a mean rank is an integer, and twice their mean is one more than their number.
    one, other = ([rank - len(values) - 1 for rank in _doubled_ranks(values)] for values in (first, second))
    covariance = sum(a * b for a, b in zip(one, other, strict=True))
    spread = sum(a * a for a in one) * sum(b * b for b in other)
    # Squared in integers, so that it is rounded once and never leaves [-1, 1].
    return math.copysign(math.sqrt(covariance * covariance / spread), covariance) if spread else None


def _doubled_ranks(values: Sequence[float]) -> list[int]:
    """Twice the rank of each value, from 1; ties have their mean rank."""
    ranks, before = [0] * len(values), 0
    for _, group in groupby(sorted(range(len(values)), key=values.__getitem__), key=values.__getitem__):
        places = [*group]
        for place in places:
            ranks[place] = 2 * before + len(places) + 1
        before += len(places)
    return ranks
