"""Classification, multi-label and regression scores: identical floats for any number of ranks and any row order.

Counts are integers, and every sum of floats is rounded once (`math.fsum`). A score with denominator zero is 0.0
(scikit-learn's zero_division=0): precision of a class that is never predicted, recall of a class without rows, F1 of a
class with neither, MCC if all rows or all predictions have one class, accuracy without rows. AUROC is None unless both
classes have rows. A correlation is None if all predictions or all targets are equal.
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
    """Base of every task's evaluation scores over `rows` rows.

    loss: mean over the loss terms; None if unknown. confusion: None except in single-label classification.
    """

    rows: int
    loss: float | None
    confusion: Confusion | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        values: dict[str, Any] = asdict(self)  # type: ignore[call-overload]
        return values


@dataclass(frozen=True)
class SourcedScores(Scores):
    """Scores over all rows (`whole`) and per data source (`sources`)."""

    whole: Scores
    sources: Mapping[str, Scores]

    def __post_init__(self) -> None:
        for name in ("rows", "loss", "confusion"):
            object.__setattr__(self, name, getattr(self.whole, name))

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON: all scores of `whole`, and the scalar scores of each source."""
        numbers = {
            name: {key: value for key, value in each.as_dict().items() if isinstance(value, int | float)}
            for name, each in self.sources.items()
        }
        return self.whole.as_dict() | {"sources": numbers}


@dataclass(frozen=True)
class ClassScores:
    """Scores of one class, in [0, 1]. support: its number of rows."""

    precision: float
    recall: float
    f1: float
    support: int


def class_scores(right: int, predicted: int, actual: int) -> ClassScores:
    """Scores of one class from its true positives (`right`), predictions and actual rows."""
    return ClassScores(
        _ratio(right, predicted), _ratio(right, actual), _ratio(2 * right, predicted + actual), support=actual
    )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


@dataclass(frozen=True)
class ClassificationScores(Scores):
    """Scores of single-label classification over `rows` rows.

    macro_f1: unweighted mean of F1 over all classes, including classes without rows. mcc: multi-class Matthews
    correlation (Gorodkin 2004), in [-1, 1]. auroc: for class 1 of two classes, else None. loss: mean over rows.
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

    positive_scores, labels: the score of class 1 (any monotone score) and the label 0 or 1 per row, in the same order,
    for AUROC with two classes. row_losses: one per row, for the mean loss.
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
        macro_f1=math.fsum(each.f1 for each in classes) / len(classes),
        # Squared as integers, so the quotient is rounded once and the root stays in [-1, 1].
        mcc=math.copysign(math.sqrt(_ratio(covariance * covariance, spreads[0] * spreads[1])), covariance),
        classes=classes,
        confusion=confusion,
        auroc=None if positive_scores is None else auroc(positive_scores, labels),
        loss=None if row_losses is None else _ratio(math.fsum(row_losses), rows),
    )


def auroc(positive_scores: Sequence[float], labels: Sequence[int]) -> float | None:
    """Area under the ROC curve: the probability that a row of class 1 scores above a row of class 0, ties counting half
    (Mann and Whitney 1947). Pairs are counted as integers. None unless both classes have rows.

    Raises `ValueError` for lists of different lengths, labels other than 0 and 1, and NaN.
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
    """Scores of multi-label classification over `rows` rows.

    subset_accuracy: share of rows whose labels are all right. micro_f1: from the counts of all labels together.
    macro_f1: unweighted mean over labels, including labels without rows. loss: mean over rows and labels.
    """

    rows: int
    subset_accuracy: float
    micro_f1: float
    macro_f1: float
    classes: tuple[ClassScores, ...]
    loss: float | None


def multi_label_scores(predicted: torch.Tensor, actual: torch.Tensor, losses: Sequence[float]) -> MultiLabelScores:
    """Scores of predicted and actual bool [rows, labels]. losses: one per row and label, in any order."""
    right, guessed, wanted = (
        [int(count) for count in table.sum(dim=0)] for table in (predicted & actual, predicted, actual)
    )
    classes = tuple(map(class_scores, right, guessed, wanted))
    return MultiLabelScores(
        rows=len(predicted),
        subset_accuracy=int((predicted == actual).all(dim=1).sum()) / max(len(predicted), 1),
        micro_f1=class_scores(sum(right), sum(guessed), sum(wanted)).f1,
        macro_f1=math.fsum(each.f1 for each in classes) / max(len(classes), 1),
        classes=classes,
        loss=math.fsum(losses) / max(len(losses), 1),
    )


@dataclass(frozen=True)
class RegressionScores(Scores):
    """Scores of regression over `rows` rows.

    mae, rmse: mean absolute error and root mean squared error, in the unit of the targets. pearson: linear correlation,
    spearman: rank correlation with mean ranks for ties; both in [-1, 1]. loss: mean squared error.
    """

    rows: int
    mae: float
    rmse: float
    pearson: float | None
    spearman: float | None
    loss: float | None


def regression_scores(predicted: Sequence[float], actual: Sequence[float]) -> RegressionScores:
    """Scores of one prediction and one target per row. Without rows the errors are 0.0.

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
    """Pearson correlation of two lists of equal length, in [-1, 1]; None if a list is constant."""
    deviations = []
    for values in (first, second):
        low, high = min(values, default=0.0), max(values, default=0.0)
        if low == high:
            return None
        scaled = [(value - low) / (high - low) for value in values]  # so squares cannot underflow
        mean = math.fsum(scaled) / len(scaled)
        deviations.append([value - mean for value in scaled])
    x, y = deviations
    covariance = math.fsum(a * b for a, b in zip(x, y, strict=True))
    spread = math.sqrt(math.fsum(a * a for a in x)) * math.sqrt(math.fsum(b * b for b in y))
    return max(-1.0, min(1.0, covariance / spread))


def spearman(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Spearman correlation of two lists of equal length, from integer ranks; None if a list is constant."""
    # Doubled mean ranks are integers, and their mean is the number of values + 1.
    x, y = ([rank - len(values) - 1 for rank in _doubled_ranks(values)] for values in (first, second))
    covariance = sum(a * b for a, b in zip(x, y, strict=True))
    spread = sum(a * a for a in x) * sum(b * b for b in y)
    # Squared as integers, so the quotient is rounded once and the root stays in [-1, 1].
    return math.copysign(math.sqrt(covariance * covariance / spread), covariance) if spread else None


def _doubled_ranks(values: Sequence[float]) -> list[int]:
    """Twice the 1-based rank of each value; ties get their mean rank."""
    ranks, before = [0] * len(values), 0
    for _, group in groupby(sorted(range(len(values)), key=values.__getitem__), key=values.__getitem__):
        places = [*group]
        for place in places:
            ranks[place] = 2 * before + len(places) + 1
        before += len(places)
    return ranks
