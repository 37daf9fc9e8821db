"""Probes: what is read of tensors becomes plain integers."""

from __future__ import annotations

import math

import pytest
import torch

from andon_contracts.digest import digests_by_name, tensor_digest, tree_digest, word_sum
from andon_contracts.observe import finite_total, nonfinite, sums_of


@pytest.mark.parametrize("place", [0, 999, 1000])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_value_that_is_not_finite_is_seen_anywhere(value: float, place: int) -> None:
    """First, last or in the middle; and it stays a tensor, so that a GPU need not be waited for."""
    tensor = torch.full((1001,), 3e38)
    assert not nonfinite(tensor)
    tensor[place] = value
    seen = nonfinite(tensor)
    assert (seen.shape, seen.dtype, bool(seen)) == ((), torch.bool, True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_finite_elements_are_finite_whatever_their_sum_is(dtype: torch.dtype) -> None:
    """Two elements whose sum is beyond the type are each finite; the look at the sum alone would not say so."""
    largest = torch.finfo(dtype).max if dtype.is_floating_point else 5
    assert not nonfinite(torch.full((2,), largest, dtype=dtype))
    assert math.isfinite(finite_total(torch.full((2,), 3e38)))


def test_an_empty_tensor_is_finite() -> None:
    """Nothing is not an error."""
    assert not nonfinite(torch.zeros(0))


def test_sums_are_those_of_the_digest() -> None:
    """Word sums in order, and behind the first whether it is finite."""
    first, second = torch.arange(5.0), torch.arange(7.0)
    plain = sums_of([first, second], finite=False).tolist()
    assert [value % 2**64 for value in plain] == [word_sum(first), word_sum(second)]
    assert sums_of([first, second], finite=True).tolist() == [plain[0], 0, plain[1]]
    first[2] = math.inf
    assert sums_of([first], finite=True).tolist()[1] == 1


def test_digests_tell_tensors_and_names_apart() -> None:
    """A changed bit changes the digest of its tensor and of the tree; a renamed tensor that of the tree."""
    tensors = {"a": torch.arange(5.0), "b": torch.zeros(3)}
    before, tree = digests_by_name(tensors), tree_digest(tensors)
    assert before["a"] == tensor_digest(torch.arange(5.0))
    assert tree_digest({"a": tensors["a"], "c": tensors["b"]}) != tree
    tensors["b"].view(torch.int32)[2] = 1
    after = digests_by_name(tensors)
    assert after["a"] == before["a"]
    assert after["b"] != before["b"]
    assert tree_digest(tensors) != tree
