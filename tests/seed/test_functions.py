"""The seed's free functions: `average_gradients`, `has_non_finite` and `shard_samples`; ids of docs/seed.md."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from andon.gradients import average_gradients, has_non_finite
from andon.step.shard import shard_samples
from andon_contracts.policy import evaluations, reset_evaluations

FP32 = st.floats(width=32)
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
NAN, INF = math.nan, math.inf


def matrices(elements: st.SearchStrategy[float]) -> st.SearchStrategy[list[list[float]]]:
    """One to five workers' gradients of one length from 0 to 6."""
    return st.integers(0, 6).flatmap(
        lambda length: st.lists(st.lists(elements, min_size=length, max_size=length), min_size=1, max_size=5)
    )


@pytest.mark.parametrize(
    ("grads", "mean"),
    [
        ([[2.0, 4.0, 6.0], [4.0, 6.0, 8.0], [6.0, 8.0, 10.0]], [4.0, 6.0, 8.0]),
        ([[1.0, 2.0, 3.0]], [1.0, 2.0, 3.0]),
        ([], []),
        ([[1.0, 2.0, 3.0], [NAN, 2.0, 3.0]], [NAN, 2.0, 3.0]),
        ([[1.0, 2.0], [INF, 2.0]], [INF, 2.0]),
        ([[NAN, 1.0], [INF, 2.0]], [NAN, 1.5]),
        ([[3e38], [3e38]], [3e38]),
    ],
    ids=["of three", "of one", "of none", "NaN", "Inf", "NaN and Inf", "near the largest"],
)
def test_the_mean_is_the_mean(grads: list[list[float]], mean: list[float]) -> None:
    """T10, T11, T13, T14, T15, T23, V11, R27: NaN and Inf stay, and a sum in fp32 would overflow."""
    found = average_gradients(grads)
    assert found == pytest.approx(mean, rel=1e-7, nan_ok=True)
    assert has_non_finite(found) is not all(map(math.isfinite, mean))


@given(matrices(FINITE))
def test_the_mean_of_finite_gradients_is_exact_to_one_rounding(grads: list[list[float]]) -> None:
    """N9, V11: finite, and at most one fp32 rounding (2^-24 relative, or half the smallest fp32) from the true mean.

    The margin: fp64 sums fp32 values exactly to 2^-50, and its own rounding can tip the last fp32 digit.
    """
    for place, value in enumerate(average_gradients(grads)):
        column = [gradient[place] for gradient in grads]
        true = math.fsum(column) / len(column)
        largest = max(abs(each) for each in column)
        assert math.isfinite(value)
        assert abs(value - true) <= 2.0**-24 * abs(true) * 1.0001 + 2.0**-48 * largest + 2.0**-150


@given(matrices(FP32))
def test_lists_and_tensors_have_one_mean_with_nan_and_inf_in_place(grads: list[list[float]]) -> None:
    """N8: the mean is NaN if a worker has NaN or if Inf meets -Inf, Inf if some worker has Inf, else finite."""
    mean = average_gradients(grads)
    for place, value in enumerate(mean):
        special = {gradient[place] for gradient in grads if not math.isfinite(gradient[place])}
        wanted = NAN if any(map(math.isnan, special)) or len(special) > 1 else special.pop() if special else value
        assert value == pytest.approx(wanted, abs=0, nan_ok=True)
    assert has_non_finite(mean) == any(has_non_finite(gradient) for gradient in grads)
    tensor = average_gradients([torch.tensor(gradient, dtype=torch.float32) for gradient in grads])
    assert tensor.dtype == torch.float32
    assert torch.equal(tensor.nan_to_num(7.0), torch.tensor(mean, dtype=torch.float32).nan_to_num(7.0))
    assert has_non_finite(tensor) == has_non_finite(mean)


@given(matrices(FINITE), st.integers(1, 4))
def test_equal_workers_change_nothing(grads: list[list[float]], copies: int) -> None:
    """R27: the mean of equal gradients is that gradient, to the bit; a sum would not be."""
    assert average_gradients([grads[0]] * copies) == grads[0]


def test_the_mean_of_one_tensor_is_a_copy_in_its_shape() -> None:
    """T14: nothing that the worker writes later changes it."""
    gradient = torch.ones(2, 3)
    mean = average_gradients([gradient])
    assert torch.equal(mean, gradient)
    assert mean.data_ptr() != gradient.data_ptr()


@pytest.mark.parametrize(
    ("grads", "worker", "said"),
    [
        ([[1.0, 2.0], [3.0]], 1, "length 1.*length 2"),
        ([[1.0], [1.0], [2.0, 3.0]], 2, "length 2.*length 1"),
        ([torch.ones(2, 3), torch.ones(3, 2)], 1, ""),
        ([torch.ones(1), [1.0]], 1, ""),
    ],
    ids=["shorter", "longer", "another shape", "another type"],
)
def test_v12_ragged_gradients_are_refused(grads: list[list[float]], worker: int, said: str) -> None:
    """V12, F-HET-001: gradients of another layout are a `ValueError` that names the worker and both lengths."""
    with pytest.raises(ValueError, match=rf"worker {worker} .*{said}"):
        average_gradients(grads)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_t12_what_is_not_finite_is_seen(bad: float, place: int) -> None:
    """T12, T23, R28: NaN, Inf and -Inf at any place, in lists and tensors."""
    values = [1.0, 2.0, 3.0]
    assert not has_non_finite(values)
    values[place] = bad
    assert has_non_finite(values)
    assert has_non_finite(torch.tensor(values))


@pytest.mark.parametrize(
    ("count", "sizes"),
    [
        (10, [3, 3, 4]),
        (2, [0, 0, 2]),
        (7, [1, 1, 1, 4]),
        (11, [2, 2, 2, 5]),
        (1, [0, 0, 1]),
        (0, [0, 0, 0]),
        (100, [14] * 6 + [16]),
        (100, [100]),
    ],
)
def test_the_last_shard_takes_the_remainder(count: int, sizes: list[int]) -> None:
    """T8, T9, T24, T25, V13, R26, F-DP-002: a shard for each worker; no sample is lost, doubled or out of order."""
    shards = shard_samples(list(range(count)), len(sizes))
    assert [len(shard) for shard in shards] == sizes
    assert [each for shard in shards for each in shard] == list(range(count))


@pytest.mark.parametrize("workers", [0, -1])
def test_v13_no_workers_are_an_error(workers: int) -> None:
    """V13: the seed gives one shard."""
    with pytest.raises(ValueError, match=str(workers)):
        shard_samples([1, 2, 3], workers)


def test_the_contract_is_evaluated() -> None:
    """The clause gradient-average runs at every call; a contract that never ran proves nothing."""
    reset_evaluations()
    average_gradients([[1.0], [2.0]])
    assert evaluations() == {"gradient-average": 1}
