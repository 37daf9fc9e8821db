"""Scores of numbers: by their definitions in exact fractions, and the same in any order of rows."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from andon.metrics.scores import pearson, regression_scores, spearman

NUMBERS = st.floats(-1e6, 1e6, width=32)
PAIRS = st.lists(
    st.tuples(NUMBERS | st.integers(-3, 3).map(float), NUMBERS | st.integers(-3, 3).map(float)), min_size=1
)


def correlation(first: list[Fraction], second: list[Fraction]) -> float | None:
    count = len(first)
    one, other = ([value - sum(values) / count for value in values] for values in (first, second))
    covariance = sum(a * b for a, b in zip(one, other, strict=True))
    spread = sum(a * a for a in one) * sum(b * b for b in other)
    return math.copysign(math.sqrt(covariance**2 / spread), covariance) if spread else None


def rank(value: float, values: list[float]) -> Fraction:
    below, equal = sum(each < value for each in values), sum(each == value for each in values)
    return Fraction(2 * below + equal + 1, 2)


@given(PAIRS)
def test_scores_are_their_definitions(pairs: list[tuple[float, float]]) -> None:
    predicted, actual = [one for one, _ in pairs], [other for _, other in pairs]
    found = regression_scores(predicted, actual)
    errors = [Fraction(one) - Fraction(other) for one, other in pairs]
    assert found.rows == len(pairs)
    assert found.mae == pytest.approx(float(sum(map(abs, errors)) / len(errors)), rel=1e-12)
    assert found.loss == pytest.approx(float(sum(error**2 for error in errors) / len(errors)), rel=1e-12)
    assert found.rmse == pytest.approx(math.sqrt(found.loss or 0), rel=1e-12)
    wanted = correlation([*map(Fraction, predicted)], [*map(Fraction, actual)])
    ranked = correlation([rank(each, predicted) for each in predicted], [rank(each, actual) for each in actual])
    assert found.pearson == (None if wanted is None else pytest.approx(wanted, abs=1e-6))
    assert found.spearman == (None if ranked is None else pytest.approx(ranked, abs=1e-15))


@given(PAIRS, st.randoms(use_true_random=False))
def test_scores_do_not_depend_on_the_order_of_rows(pairs: list[tuple[float, float]], random: object) -> None:
    shuffled = sorted(pairs, key=lambda _: random.random())  # type: ignore[attr-defined]
    one, other = (regression_scores([a for a, _ in each], [b for _, b in each]) for each in (pairs, shuffled))
    assert one == other


def test_ties_have_the_mean_of_their_ranks() -> None:
    """Ranks 1.5, 1.5, 3 against 1, 2, 3: covariance 1.5 over the root of 1.5 * 2."""
    assert spearman([1.0, 1.0, 2.0], [1.0, 2.0, 3.0]) == pytest.approx(1.5 / math.sqrt(3))
    assert pearson([1.0, 2.0, 3.0], [2.0, 4.0, 6.0]) == pytest.approx(1)
    assert pearson([1.0, 1.0], [1.0, 2.0]) is spearman([0.1] * 3, [1.0, 2.0, 3.0]) is None


def test_what_is_not_finite_or_of_two_lengths_is_refused() -> None:
    for predicted in ([math.nan], [math.inf], []):
        with pytest.raises(ValueError, match=r"finite|longer"):
            regression_scores(predicted, [1.0])
    assert regression_scores([], []).mae == 0.0
