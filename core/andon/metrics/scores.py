"""Scores from exact counts: the same floats on any number of workers and in any order of rows.

Counts are integers, so adding those of several workers is exact.

If a denominator is zero, the score is 0.0 (scikit-learn's zero_division=0): precision of a class never predicted,
recall of a class without rows, F1 of a class with neither, MCC when all rows or all predictions are of one class,
accuracy of no rows. AUROC is None without a row of each class.
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
    """Scores of one class in [0, 1], and its number of rows (`support`)."""

    precision: float
    recall: float
    f1: float
    support: int


@dataclass(frozen=True)
class WithoutMatrix:
    """Base class of scores without a confusion matrix."""

    @property
    def confusion(self) -> None:
        return None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Scores(Protocol):
    """Scores of an evaluation over `rows` rows, of any task.

    loss: mean over the loss terms; None if unknown. confusion: None for a task that predicts no single class. as_dict:
    plain values for JSON.
    """

    @property
    def rows(self) -> int: ...

    @property
    def loss(self) -> float | None: ...

    @property
    def confusion(self) -> Confusion | None: ...

    def as_dict(self) -> dict[str, Any]: ...


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
    if row_losses is not None and len(row_losses) != rows:
        raise ValueError(f"{len(row_losses)} losses for {rows} rows")
    area = None
    if positive_probabilities is not None and labels is not None:
        if len(classes) != 2 or len(labels) != rows:
            what = f"AUROC needs two classes and a label for each of {rows} rows"
            raise ValueError(f"{what}, not {len(classes)} and {len(labels)}")
        area = auroc(positive_probabilities, labels)
    return ClassificationScores(
        rows=rows,
        accuracy=_ratio(sum(right), rows),
        macro_f1=math.fsum(one.f1 for one in classes) / len(classes),
        mcc=_mcc(sum(right), rows, actual, predicted),
        classes=classes,
        confusion=confusion,
        auroc=area,
        loss=None if row_losses is None else _ratio(math.fsum(row_losses), rows),
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
    """The scores of one class from its counts of right predictions, predictions and rows."""
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
