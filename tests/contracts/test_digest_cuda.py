"""The Triton kernel gives the CPU's digest. Needs a CUDA GPU with Triton."""

from __future__ import annotations

import pytest
import torch

from andon_contracts.digest import tensor_digest, word_sum

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.parametrize("count", [1, 2, 7, 1023, 1024, 4097, 65_536, 1_000_003])
@pytest.mark.parametrize("start", [0, 5, 12_345_678_901])
def test_same_word_sum_on_gpu_and_cpu(count: int, start: int) -> None:
    """Every length and starting position gives the value that the CPU gives."""
    words = torch.randint(-(2**63), 2**63 - 1, (count,), generator=torch.Generator().manual_seed(count))

    assert word_sum(words.cuda(), start) == word_sum(words, start)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_same_digest_for_odd_lengths_and_offsets(dtype: torch.dtype) -> None:
    """Tails shorter than a word and views that start inside a word are digested alike."""
    values = torch.arange(10_001).to(dtype)

    for view in (values, values[1:], values[3:-2]):
        assert tensor_digest(view.cuda()) == tensor_digest(view)


def test_counts_what_is_not_finite() -> None:
    """The same pass counts NaN and both infinities, and nothing else."""
    from andon_contracts.digest_cuda import word_sums_and_nonfinite

    values = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    values[5], values[17], values[9_999] = -torch.inf, torch.nan, torch.inf

    ((total, odd),) = word_sums_and_nonfinite([values.cuda().view(torch.int64)]).tolist()

    assert odd == 3
    assert total % 2**64 == word_sum(values)


def test_every_kernel_is_there() -> None:
    """What these tests compare is a kernel's with torch's: each would pass if both were torch's."""
    from andon.step import content, gate
    from andon_contracts import digest, observe

    loaded = [digest._kernel(), digest._row_kernel(), observe._kernel(), content._kernel(), gate._kernel()]

    assert all(kernel is not None for kernel in loaded)
