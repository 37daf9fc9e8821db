"""The Triton kernels give the CPU's digests: of tensors, of rows, of several tensors at once. Those tests need a CUDA
GPU with Triton. Where Triton is missing it is said, once.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from importlib.machinery import ModuleSpec

import pytest
import torch

from andon_contracts.digest import has_triton, mix64, row_digests, tensor_digest, word_sum
from andon_contracts.observe import word_sums

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@on_a_gpu
@pytest.mark.parametrize("count", [1, 2, 7, 1023, 1024, 4097, 65_536, 1_000_003])
@pytest.mark.parametrize("start", [0, 5, 12_345_678_901])
def test_same_word_sum_on_gpu_and_cpu(count: int, start: int) -> None:
    words = torch.randint(-(2**63), 2**63 - 1, (count,), generator=torch.Generator().manual_seed(count))

    assert word_sum(words.cuda(), start) == word_sum(words, start)


@on_a_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_same_digest_for_odd_lengths_and_offsets(dtype: torch.dtype) -> None:
    values = torch.arange(10_001).to(dtype)

    for view in (values, values[1:], values[3:-2]):
        assert tensor_digest(view.cuda()) == tensor_digest(view)


@on_a_gpu
def test_counts_what_is_not_finite() -> None:
    from andon_contracts.kernels import word_sums_and_nonfinite

    values = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    values[5], values[17], values[9_999] = -torch.inf, torch.nan, torch.inf

    ((total, odd),) = word_sums_and_nonfinite([values.cuda().view(torch.int64)]).tolist()

    assert odd == 3
    assert total % 2**64 == word_sum(values)


@on_a_gpu
def test_every_kernel_is_there() -> None:
    """What these tests compare is a kernel's with torch's: each would pass if both were torch's."""
    from andon.step import gate
    from andon_contracts.digest import kernels

    assert kernels() is not None
    assert gate._kernel() is not None


def _words(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(-(2**63), 2**63 - 1, shape, generator=generator)


@on_a_gpu
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 7), (8, 257), (33, 1000)])
def test_rows_have_the_digests_of_the_cpu(rows: int, columns: int) -> None:
    values = _words(rows, columns + 3)[:, 1 : columns + 1]
    lengths = torch.arange(rows) * 31 % (columns + 1)
    assert row_digests(values.cuda(), lengths.cuda()).cpu().equal(row_digests(values, lengths))


@on_a_gpu
def test_runs_are_bound_to_their_places_and_summed() -> None:
    from andon_contracts.kernels import bound_sums_on_device

    rows = _words(200)
    runs = [(0, 5, 70), (70, 0, 0), (70, 1000, 65), (135, 75, 65)]
    found = bound_sums_on_device(rows.cuda(), torch.tensor(runs).cuda()).tolist()
    for total, (start, first, count) in zip(found, runs, strict=True):
        places = mix64(torch.arange(first + 1, first + 1 + count))
        assert total == int(mix64(rows[start : start + count] + places).sum())


@on_a_gpu
@pytest.mark.parametrize("count", [1, 2, 3])
def test_several_tensors_in_one_launch(count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    flats = [torch.randn(4096 + 16, generator=generator) for _ in range(count)]
    flats[-1][7] = torch.inf
    there = [flat.cuda() for flat in flats[::-1]][::-1]
    found = [value % 2**64 for value in word_sums(there, finite=True).tolist()]
    sums = [word_sum(flat) for flat in flats]
    assert found == [sums[0], int(count == 1), *sums[1:]]
    assert word_sums(there, finite=False).tolist() == word_sums(flats, finite=False).tolist()


LOOKED_UP: Callable[[], bool] = has_triton.__wrapped__
"""Without what it keeps of its first call."""


def test_a_missing_triton_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.warns(RuntimeWarning, match="Triton is not installed"):
        assert not LOOKED_UP()


def test_one_that_is_there_is_used_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: ModuleSpec(name, None))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert LOOKED_UP()
