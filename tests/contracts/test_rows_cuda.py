"""The Triton kernels of rows and of several tensors give the CPU's values. Needs a CUDA GPU with Triton."""

from __future__ import annotations

import pytest
import torch

from andon_contracts.digest import mix64, row_digests, word_sum
from andon_contracts.observe import sums_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def _words(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(-(2**63), 2**63 - 1, shape, generator=generator)


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 7), (8, 257), (33, 1000)])
def test_rows_have_the_digests_of_the_cpu(rows: int, columns: int) -> None:
    """Any number of columns, any length of a row, none included, and rows that are views."""
    values = _words(rows, columns + 3)[:, 1 : columns + 1]
    lengths = torch.arange(rows) * 31 % (columns + 1)
    assert row_digests(values.cuda(), lengths.cuda()).cpu().equal(row_digests(values, lengths))


def test_runs_are_bound_to_their_places_and_summed() -> None:
    """Runs of any length, one of them empty, at places that do not follow each other."""
    from andon_contracts.rows_cuda import bound_sums_on_device

    rows = _words(200)
    runs = [(0, 5, 70), (70, 0, 0), (70, 1000, 65), (135, 75, 65)]
    found = bound_sums_on_device(rows.cuda(), torch.tensor(runs).cuda()).tolist()
    for total, (start, first, count) in zip(found, runs, strict=True):
        places = mix64(torch.arange(first + 1, first + 1 + count))
        assert total == int(mix64(rows[start : start + count] + places).sum())


@pytest.mark.parametrize("count", [1, 2, 3])
def test_several_tensors_in_one_launch(count: int) -> None:
    """Each has its own sum, whichever lies first in memory; what is not finite is told of the first."""
    generator = torch.Generator().manual_seed(count)
    flats = [torch.randn(4096 + 16, generator=generator) for _ in range(count)]
    flats[-1][7] = torch.inf
    there = [flat.cuda() for flat in flats[::-1]][::-1]
    found = [value % 2**64 for value in sums_of(there, finite=True).tolist()]
    sums = [word_sum(flat) for flat in flats]
    assert found == [sums[0], int(count == 1), *sums[1:]]
    assert sums_of(there, finite=False).tolist() == sums_of(flats, finite=False).tolist()
