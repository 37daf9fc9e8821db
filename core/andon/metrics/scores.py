"""Scores from exact counts: the same floats on any number of workers and in any order of rows.

Counts are integers, so that adding those of several workers is exact.

Where a denominator is zero the score is 0.0 (scikit-learn's zero_division=0): precision of a class never predicted,
recall of a class without rows, F1 of a class with neither, MCC when all rows or all predictions are of one class,
accuracy of no rows. AUROC without a row of each class does not exist: None.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from andon.metrics.confusion import Confusion


@dataclass(frozen=True)
class ClassScores:
    """One class: support is its number of rows; the others are in [0, 1]."""

    precision: float
    recall: float
    f1: float
    support: int


@dataclass(frozen=True)
class WithoutMatrix:
    """Scores of rows that have no confusion matrix: of a number, of several labels, or of tags by their spans."""

    @property
    def confusion(self) -> None:
        """There is none."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


class Scores(Protocol):
    """Scores of an evaluation over `rows` rows, whatever the task."""

    @property
    def rows(self) -> int:
        """How many rows were scored."""
        ...

    @property
    def loss(self) -> float | None:
        """The mean over what the sum of losses is divided by; None where it is not known."""
        ...

    @property
    def confusion(self) -> Confusion | None:
        """The confusion matrix; None for a task that predicts no single class."""
        ...

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        ...


@dataclass(frozen=True)
class ClassificationScores:
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

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def scores(
    confusion: Confusion,
    positive_probabilities: Sequence[float] | None = None,
    labels: Sequence[int] | None = None,
    row_losses: Sequence[float] | None = None,
) -> ClassificationScores:
    """Scores of a confusion matrix.

    positive_probabilities and labels (0 or 1), one a row in one order, give the AUROC of class 1 (any score that grows
    with the class will do); only for two classes. row_losses, one a row, give the loss. Raises `ValueError` for lists
    whose lengths are not the number of rows.
    """
    actual, predicted, right = ([0] * confusion.classes for _ in range(3))
    for true, guess, count in confusion.cells:
        actual[true] += count
        predicted[guess] += count
        right[true] += count if true == guess else 0
    rows = sum(actual)
    classes = tuple(map(class_scores, right, predicted, actual))
    return ClassificationScores(
        rows=rows,
        accuracy=_ratio(sum(right), rows),
        macro_f1=math.fsum(one.f1 for one in classes) / len(classes),
        mcc=_mcc(sum(right), rows, actual, predicted),
        classes=classes,
        confusion=confusion,
        auroc=_auroc_of(rows, len(classes), positive_probabilities, labels),
        loss=_mean_loss(rows, row_losses),
    )


def auroc(positive_probabilities: Sequence[float], labels: Sequence[int]) -> float | None:
    """The chance that a row of class 1 scores above one of class 0, ties counting half (Mann and Whitney 1947).

    Counted in integers over the sorted scores. None without a row of each class. Raises `ValueError` for lists of
    different lengths, labels other than 0 and 1, and NaN.
    """
    if len(positive_probabilities) != len(labels):
        msg = f"{len(positive_probabilities)} probabilities for {len(labels)} labels"
        raise ValueError(msg)
    strange = sorted({label for label in labels if label not in (0, 1)})
    if strange or any(map(math.isnan, positive_probabilities)):
        msg = f"labels {strange} are not 0 or 1" if strange else "a probability is NaN"
        raise ValueError(msg)
    pairs = list(zip(positive_probabilities, labels, strict=True))
    positive = [score for score, label in pairs if label == 1]
    negative = sorted(score for score, label in pairs if label == 0)
    if not positive or not negative:
        return None
    doubled = sum(bisect_left(negative, score) + bisect_right(negative, score) for score in positive)
    return doubled / (2 * len(positive) * len(negative))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def class_scores(right: int, predicted: int, actual: int) -> ClassScores:
    """The scores of one class: how many were predicted right, predicted, and there."""
    return ClassScores(
        precision=_ratio(right, predicted),
        recall=_ratio(right, actual),
        f1=_ratio(2 * right, predicted + actual),
        support=actual,
    )


def _mcc(right: int, rows: int, actual: Sequence[int], predicted: Sequence[int]) -> float:
    covariance = right * rows - sum(a * p for a, p in zip(actual, predicted, strict=True))
    spread_actual = rows * rows - sum(count * count for count in actual)
    spread_predicted = rows * rows - sum(count * count for count in predicted)
    # Squared in integers, so that it is rounded once and never leaves [-1, 1].
    return math.copysign(math.sqrt(_ratio(covariance * covariance, spread_actual * spread_predicted)), covariance)


def _auroc_of(
    rows: int, num_labels: int, probabilities: Sequence[float] | None, labels: Sequence[int] | None
) -> float | None:
    if probabilities is None or labels is None:
        return None
    if num_labels != 2 or len(labels) != rows:
        msg = f"AUROC needs two classes and a label for each of {rows} rows, not {num_labels} and {len(labels)}"
        raise ValueError(msg)
    return auroc(probabilities, labels)


def _mean_loss(rows: int, row_losses: Sequence[float] | None) -> float | None:
    if row_losses is None:
        return None
    if len(row_losses) != rows:
        msg = f"{len(row_losses)} losses for {rows} rows"
        raise ValueError(msg)
    return _ratio(math.fsum(row_losses), rows)
