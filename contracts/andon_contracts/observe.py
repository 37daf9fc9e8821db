"""Probes: what is read of tensors becomes plain integers here, before anything is judged."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch

from andon_contracts.digest import word_sum_tensor
from andon_contracts.triton_kernels import has_triton

_WORD = 8
_NARROW = (torch.float32, torch.bfloat16, torch.float16)


def finite_total(tensor: torch.Tensor) -> torch.Tensor:
    """0-dim fp64 on the device of `tensor` (fp32 or less): finite exactly where every element is. No wait for it.

    What is not finite stays so in any sum. On a GPU the sum is taken in fp64, where finite fp32 cannot overflow it; on
    a CPU, where that is slow, the elements are looked at if their own sum is not finite.
    """
    if tensor.device.type != "cpu":
        return tensor.sum(dtype=torch.float64)
    total = tensor.sum().double()
    if not math.isfinite(float(total)) and bool(torch.isfinite(tensor).all()):
        total.zero_()
    return total


def nonfinite(tensor: torch.Tensor) -> torch.Tensor:
    """0-dim bool on the tensor's device: whether any element is NaN or Inf. No wait for the device."""
    if tensor.dtype in _NARROW:
        return torch.isfinite(finite_total(tensor)).logical_not()
    return torch.isfinite(tensor).all().logical_not()


def sums_of(flats: Sequence[torch.Tensor], *, finite: bool) -> torch.Tensor:
    """int64 [n] on the tensors' device: the word sum of each of `flats`, of one size each. No wait for the device.

    finite: behind the sum of the first stands a number that is not 0 where an element of it is NaN or Inf. Up to three
    fp32 vectors on a GPU are read in one launch.
    """
    kernel = _kernel() if flats[0].is_cuda and all(map(_one_pass, flats)) else None
    if kernel is not None:
        found = kernel([flat.detach().view(torch.int64) for flat in flats])
        return torch.cat([found[0], found[1:, 0]]) if finite else found[:, 0]
    sums = [word_sum_tensor(flat) for flat in flats]
    if finite:
        sums.insert(1, nonfinite(flats[0]).to(torch.int64))
    return torch.stack(sums)


def _one_pass(tensor: torch.Tensor) -> bool:
    """Whether the kernel can read `tensor`: fp32, in whole and aligned words."""
    return (
        tensor.dtype == torch.float32
        and tensor.is_contiguous()
        and tensor.numel() > 0
        and tensor.numel() % 2 == 0
        and tensor.data_ptr() % _WORD == 0
        and tensor.storage_offset() % 2 == 0
    )


@functools.cache
def _kernel() -> Callable[[Sequence[torch.Tensor]], torch.Tensor] | None:
    """The one-pass kernel for CUDA; None where Triton is not installed."""
    if not has_triton():
        return None
    from andon_contracts.digest_cuda import word_sums_and_nonfinite

    return word_sums_and_nonfinite
