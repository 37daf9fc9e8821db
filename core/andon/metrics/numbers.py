"""Scores of predicted numbers, the same floats on any number of workers and in any order of rows.

Every sum is rounded once (`math.fsum`) or is of integers. A correlation is None if all predictions or all targets are
equal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from andon.metrics.scores import WithoutMatrix


@dataclass(frozen=True)
class RegressionScores(WithoutMatrix):
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
    if len(predicted) != len(actual):
        msg = f"{len(predicted)} predictions for {len(actual)} targets"
        raise ValueError(msg)
    if not all(map(math.isfinite, (*predicted, *actual))):
        raise ValueError("a prediction or a target is not finite")
    errors = [guess - target for guess, target in zip(predicted, actual, strict=True)]
    count = max(len(errors), 1)
    squared = math.fsum(error * error for error in errors) / count
    return RegressionScores(
        rows=len(errors),
        mae=math.fsum(map(abs, errors)) / count,
        rmse=math.sqrt(squared),
        pearson=pearson(predicted, actual),
        spearman=spearman(predicted, actual),
        loss=squared,
    )


def pearson(first: Sequence[float], second: Sequence[float]) -> float | None:
    """The correlation of two lists of one length, in [-1, 1]; None if a list is constant."""
    apart = [_apart(values) for values in (first, second)]
    if not all(map(any, apart)):
        return None
    one, other = apart
    covariance = math.fsum(a * b for a, b in zip(one, other, strict=True))
    spread = math.sqrt(math.fsum(a * a for a in one)) * math.sqrt(math.fsum(b * b for b in other))
    return max(-1.0, min(1.0, covariance / spread))


def _apart(values: Sequence[float]) -> list[float]:
    """The deviation of each value from the mean, in units of their range, so that no square underflows."""
    low, high = min(values, default=0.0), max(values, default=0.0)
    if low == high:
        return [0.0] * len(values)
    scaled = [(value - low) / (high - low) for value in values]
    mean = math.fsum(scaled) / len(scaled)
    return [value - mean for value in scaled]


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
    ranks = [0] * len(values)
    behind = 0
    for _, group in groupby(sorted(range(len(values)), key=values.__getitem__), key=values.__getitem__):
        places = [*group]
        for place in places:
            ranks[place] = 2 * behind + len(places) + 1
        behind += len(places)
    return ranks
