"""Class weights (F-TUNE-005 of the seed) and label maps."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from andon.console.problems import InputError
from andon.data.labels import ClassWeights, alike, class_weights, label_names, same_kind

COUNTS = st.lists(st.integers(1, 10**6), min_size=1, max_size=20)
KINDS = st.sampled_from(["uniform", "inverse", "sqrt_inverse"])


@given(KINDS, COUNTS)
def test_weights_are_positive_and_their_sum_is_the_number_of_classes(kind: ClassWeights, counts: list[int]) -> None:
    """F-TUNE-005: the sum is K, so that a weighted loss stays on the scale of the unweighted one."""
    weights = class_weights(kind, counts)
    assert len(weights) == len(counts)
    assert min(weights) > 0
    assert math.isclose(math.fsum(weights), len(counts), rel_tol=1e-12)


@given(COUNTS)
def test_inverse_weights_make_every_class_weigh_the_same(counts: list[int]) -> None:
    exact = Fraction(len(counts)) / sum(Fraction(1, count) for count in counts)
    for weight, count in zip(class_weights("inverse", counts), counts, strict=True):
        assert math.isclose(weight * count, float(exact), rel_tol=1e-12)


@given(COUNTS)
def test_sqrt_inverse_weights_are_as_the_roots_of_the_inverse_ones(counts: list[int]) -> None:
    roots, full = class_weights("sqrt_inverse", counts), class_weights("inverse", counts)
    for root, whole in zip(roots, full, strict=True):
        assert math.isclose((root / roots[0]) ** 2, whole / full[0], rel_tol=1e-9)


def test_even_counts_give_weight_one() -> None:
    for kind in ("uniform", "inverse", "sqrt_inverse"):
        assert class_weights(kind, [7, 7, 7, 7]) == pytest.approx((1.0, 1.0, 1.0, 1.0))
    assert class_weights("uniform", [5, 0]) == (1.0, 1.0)


@pytest.mark.parametrize("kind", ["inverse", "sqrt_inverse"])
def test_every_class_without_rows_is_refused_by_number(kind: ClassWeights) -> None:
    with pytest.raises(InputError) as caught:
        class_weights(kind, [0, 3, 0])
    assert [problem.what[-1] for problem in caught.value.problems] == ["0", "2"]
    assert all(problem.where == "data.class_weights" for problem in caught.value.problems)


def test_no_classes_have_no_weights() -> None:
    with pytest.raises(InputError):
        class_weights("uniform", [])


def test_integers_are_ordered_by_value_and_strings_by_letters() -> None:
    assert label_names([10, 9, 10, 0]) == ("0", "9", "10")
    assert label_names(["10", "9", "a"]) == ("10", "9", "a")


def test_cells_of_a_table_are_integers_only_when_all_of_them_are_plain_ones() -> None:
    assert same_kind(["3", "10"], typed=False) == ([3, 10], [])
    assert same_kind(["007", "7"], typed=False) == (["007", "7"], [])
    assert same_kind(["3", "10"], typed=True) == (["3", "10"], [])


@pytest.mark.parametrize("typed", [True, False])
def test_the_labels_of_the_rarer_type_are_the_faults(typed: bool) -> None:
    numbers: list[int | str] = [1, 2, 3] if typed else ["1", "2", "3"]
    assert [place for place, _ in same_kind([*numbers, "a", "b"], typed)[1]] == [3, 4]
    assert [place for place, _ in same_kind([numbers[0], "a", "b"], typed)[1]] == [0]


def test_names_that_look_alike_are_found() -> None:
    composed, apart = "caf\u00e9", "cafe\u0301"
    assert alike(["pos", "neg", "pos ", "POS", composed, "cafe", apart]) == [["pos", "pos ", "POS"], [composed, apart]]


def test_an_empty_class_is_refused_by_its_name() -> None:
    with pytest.raises(InputError, match="there is none of class 'urgent'"):
        class_weights("inverse", [3, 0], ("usual", "urgent"))
