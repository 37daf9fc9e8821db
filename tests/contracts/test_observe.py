"""Probes: what is read of tensors becomes plain integers."""

from __future__ import annotations

import math

import pytest
import torch

from andon_contracts.observe import digest_of, digest_of_tree, digests_by_name, nonfinite


@pytest.mark.parametrize("place", [0, 999, 1000])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_value_that_is_not_finite_is_seen_anywhere(value: float, place: int) -> None:
    """First, last or in the middle; and it stays a tensor, so that a GPU need not be waited for."""
    tensor = torch.full((1001,), 3e38)
    assert not nonfinite(tensor)
    tensor[place] = value
    seen = nonfinite(tensor)
    assert (seen.shape, seen.dtype, bool(seen)) == ((), torch.bool, True)


def test_an_empty_tensor_is_finite() -> None:
    """Nothing is not an error."""
    assert not nonfinite(torch.zeros(0))


def test_digests_tell_tensors_and_names_apart() -> None:
    """A changed bit changes the digest of its tensor and of the tree; a renamed tensor that of the tree."""
    tensors = {"a": torch.arange(5.0), "b": torch.zeros(3)}
    before, tree = digests_by_name(tensors), digest_of_tree(tensors)
    assert before["a"] == digest_of(torch.arange(5.0))
    assert digest_of_tree({"a": tensors["a"], "c": tensors["b"]}) != tree
    tensors["b"].view(torch.int32)[2] = 1
    after = digests_by_name(tensors)
    assert after["a"] == before["a"]
    assert after["b"] != before["b"]
    assert digest_of_tree(tensors) != tree
