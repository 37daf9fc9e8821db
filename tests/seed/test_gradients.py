"""`average_gradients` and `has_non_finite` over all inputs: the mean of fp32 vectors, whatever is in them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from andon.gradients import average_gradients, has_non_finite
from andon_contracts.policy import evaluations, reset_evaluations

FP32 = st.floats(width=32)
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)


def matrices(elements: st.SearchStrategy[float]) -> st.SearchStrategy[list[list[float]]]:
    """One to five workers' gradients of one length from 0 to 6."""
    return st.integers(0, 6).flatmap(
        lambda length: st.lists(st.lists(elements, min_size=length, max_size=length), min_size=1, max_size=5)
    )


@given(matrices(FINITE))
def test_the_mean_of_finite_gradients_is_exact_to_one_rounding(grads: list[list[float]]) -> None:
    """N9, V11: finite, and at most one fp32 rounding (2^-24 relative, or half the smallest fp32) from the true mean.

    The sum of fp32 values is exact to 2^-50 in fp64, whose own rounding can tip the last fp32 digit, hence the margin.
    """
    mean = average_gradients(grads)
    for place, value in enumerate(mean):
        column = [gradient[place] for gradient in grads]
        true = math.fsum(column) / len(column)
        largest = max(abs(each) for each in column)
        assert math.isfinite(value)
        assert abs(value - true) <= 2.0**-24 * abs(true) * 1.0001 + 2.0**-48 * largest + 2.0**-150


@given(matrices(FP32))
def test_nan_and_inf_stay_where_they_are(grads: list[list[float]]) -> None:
    """N8: an element is NaN where a worker's is or where Inf meets -Inf, Inf where one is, else finite."""
    mean = average_gradients(grads)
    for place, value in enumerate(mean):
        column = [gradient[place] for gradient in grads]
        special = [each for each in column if not math.isfinite(each)]
        if not special:
            assert math.isfinite(value)
        elif any(map(math.isnan, special)) or len(set(special)) > 1:
            assert math.isnan(value)
        else:
            assert value == special[0]
    assert has_non_finite(mean) == any(has_non_finite(gradient) for gradient in grads)


@given(matrices(FP32))
def test_lists_and_tensors_give_the_same(grads: list[list[float]]) -> None:
    """R27: the kind that goes in comes out, with the same bits, in fp32."""
    tensors = [torch.tensor(gradient, dtype=torch.float32) for gradient in grads]
    mean = average_gradients(tensors)
    assert mean.dtype == torch.float32
    assert torch.equal(
        mean.view(torch.int32), torch.tensor(average_gradients(grads), dtype=torch.float32).view(torch.int32)
    ) or bool(mean.isnan().any())
    assert has_non_finite(mean) == has_non_finite(mean.tolist())


@given(matrices(FINITE), st.integers(1, 4))
def test_equal_workers_change_nothing(grads: list[list[float]], copies: int) -> None:
    """R27: the mean of equal gradients is that gradient, to the bit; a sum would not be."""
    assert average_gradients([grads[0]] * copies) == grads[0]


def test_shapes_are_kept_and_compared() -> None:
    """V12: tensors keep their shape; equal numbers of elements in another shape are another layout."""
    assert average_gradients([torch.ones(2, 3), torch.zeros(2, 3)]).shape == (2, 3)
    with pytest.raises(ValueError, match="worker 1"):
        average_gradients([torch.ones(2, 3), torch.ones(3, 2)])
    with pytest.raises(ValueError, match="worker 1"):
        average_gradients([torch.ones(1), [1.0]])  # type: ignore[list-item]


def test_the_contract_is_evaluated() -> None:
    """The clause gradient-average runs at every call; a contract that never ran proves nothing."""
    reset_evaluations()
    average_gradients([[1.0], [2.0]])
    assert evaluations() == {"gradient-average": 1}
