"""The Triton kernels give the CPU's digests, sums and extremes: of tensors, rows and lists of tensors.

These tests need a CUDA GPU with Triton. The kernels for lists of tensors also run on a CPU, in Triton's interpreter,
if the process starts with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from andon_contracts.digest import has_triton, mix64, row_digests, tensor_digest, word_sum
from andon_contracts.observe import Extremes, Observer, norm_of, to_cpu, word_sums

HAS_GPU = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
with_kernels = pytest.mark.skipif(not (HAS_GPU or INTERPRETED), reason="needs a CUDA GPU, or Triton's interpreter")
on_a_gpu = pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA GPU")

SIZES = st.sampled_from([0, 1, 2, 7, 8, 15, 1000, 4096 * 8, 4096 * 8 + 6, 2 * 4096 * 8 + 13])


@with_kernels
@settings(max_examples=25)
@given(st.lists(st.tuples(SIZES, st.integers(0, 17), st.integers(0, 2)), min_size=1, max_size=12))
def test_sums_are_those_of_each_tensor_wherever_it_lies(made: list[tuple[int, int, int]]) -> None:
    from andon_contracts.kernels import ListSums

    memory = torch.randint(0, 256, (200_000,), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    there = memory.to(DEVICE)
    rows = [(size, 3 * index, place) for index, (size, _, place) in enumerate(made)]
    views = [there[offset : offset + size] for size, offset, _ in made]
    sums = ListSums(DEVICE, rows).read(views).tolist()
    for place, found in enumerate(sums):
        expected = sum(
            word_sum(memory[offset : offset + size], start)
            for (size, offset, mine), (_, start, _) in zip(made, rows, strict=True)
            if mine == place
        )
        assert found % 2**64 == expected % 2**64


@with_kernels
def test_a_tensor_that_moved_is_read_where_it_is_now() -> None:
    from andon_contracts.kernels import ListSums

    sums = ListSums(DEVICE, [(80, 0, 0), (24, 0, 1)])
    first = [torch.arange(10, device=DEVICE), torch.arange(3, device=DEVICE)]
    second = [torch.arange(10, 20, device=DEVICE), first[1]]
    for tensors in (first, second, first, first):
        assert [found % 2**64 for found in sums.read(tensors).tolist()] == [word_sum(each) for each in tensors]
        tensors[1][0] += 1


def test_what_lies_on_a_cpu_is_brought_as_it_is() -> None:
    one, other = [torch.arange(3)], [torch.tensor(1.5), torch.tensor([True])]
    before = [*one, *other]
    to_cpu(one, [], other)
    assert all(now is was for now, was in zip([*one, *other], before, strict=True))


@on_a_gpu
def test_what_devices_found_is_brought_together() -> None:
    held = [
        torch.tensor([1, -2], device="cuda"),
        torch.tensor(1.5, device="cuda"),
        torch.tensor([[7]], dtype=torch.int32),
    ]
    other = [torch.tensor([True, False, True], device="cuda"), torch.full((2, 2), math.inf, device="cuda").double()]
    expected = [each.cpu() for each in [*held, *other]]
    to_cpu(held, other)
    for now, was in zip([*held, *other], expected, strict=True):
        assert (now.device.type, now.dtype, now.tolist()) == ("cpu", was.dtype, was.tolist())


def _mixed() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    sizes = [(), (), (3,), (301, 7), (70_001,), (0,), (5, 5), (1,), (200_000,), (64,)]
    dtypes = [torch.float32, torch.bfloat16, torch.float32, torch.int64, torch.float16]
    return [torch.randn(size, generator=generator).mul(50).to(dtypes[i % 5]) for i, size in enumerate(sizes * 2)]


@on_a_gpu
def test_the_digest_of_a_gpu_is_the_portable_one_of_a_cpu() -> None:
    here = _mixed()
    there = tuple(each.cuda() for each in here)
    reader = Observer()
    for _ in range(2):
        assert reader.look(there).digest == Observer(portable=True).look(here).digest
        here[3].add_(1)
        there[3].add_(1)
    views = [torch.arange(99.0)[3:], torch.ones(6, 5).T, torch.arange(9).bfloat16()[1:]]
    assert Observer().look([v.cuda() for v in views]).digest == Observer(portable=True).look(views).digest


@on_a_gpu
def test_the_norm_of_a_list_on_a_gpu_is_that_of_all_elements() -> None:
    there = [each.cuda() for each in _mixed() if each.is_floating_point()]
    assert Observer().look(there, norm=True).norm == pytest.approx(norm_of(there), rel=1e-4)
    assert Observer().look([torch.full((4,), 1e30).cuda()], norm=True).norm == math.inf


@on_a_gpu
def test_raw_gradients_are_read_as_they_were_when_a_pass_gave_them() -> None:
    seen = Extremes()
    gradients = [torch.full((5, 3), float(index), device="cuda") for index in range(4)]
    gradients[2][1, 1] = math.nan
    for index, gradient in enumerate(gradients):
        seen.add(index, gradient)
    seen.add(0, torch.full((5, 3), -7.0, device="cuda"))
    for gradient in gradients:
        gradient.fill_(9.0)
    found = seen.read()
    assert [repr(each) for each in sorted(found, key=lambda each: each[:2])] == [
        "(0, -7.0, -7.0)", "(0, 0.0, 0.0)", "(1, 1.0, 1.0)", "(2, nan, nan)", "(3, 3.0, 3.0)",
    ]  # fmt: skip
    seen.clear()
    assert seen.read() == []
    assert not seen.added


# Digests of tensors and of rows.


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
    values = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    values[5], values[17], values[9_999] = -torch.inf, torch.nan, torch.inf
    total, odd = word_sums([values.cuda()], finite=True).tolist()
    assert (total % 2**64, odd) == (word_sum(values), 3)


@on_a_gpu
def test_every_kernel_is_there() -> None:
    """What these tests compare is a kernel's with torch's: each would pass if both were torch's."""
    from andon.step.gate_cuda import close_on_device
    from andon_contracts.digest import kernels

    assert kernels() is not None
    assert callable(close_on_device)


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


LOOKED_UP: Callable[[], bool] = has_triton.__wrapped__  # without what it keeps of its first call


def test_a_missing_triton_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.warns(RuntimeWarning, match="Triton is not installed"):
        assert not LOOKED_UP()
