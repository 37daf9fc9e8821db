"""The word sum of the digest as one Triton kernel: the CPU's value, at the speed of reading the memory once.

Each program mixes a run of 64-bit words with their positions and adds one partial sum atomically; sums modulo 2^64
commute, so neither the grid nor the order is part of the result. The same pass can count the fp32 values that are not
finite, and one launch takes several tensors of one size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

_BLOCK = 1024
_ROUNDS_LARGE = 32
_ROUNDS_SMALL = 4
_SMALL_WORDS = 1 << 24
_WARPS = 4
_WORD = 8
MOST = 3
"""Tensors that one launch takes."""


@triton.jit  # type: ignore[untyped-decorator]
def _mixed_sums(  # type: ignore[no-untyped-def]
    words, out, second, third, count, start, BLOCK: tl.constexpr, ROUNDS: tl.constexpr, FINITE: tl.constexpr
):
    program = tl.program_id(0).to(tl.int64)
    which = tl.program_id(1)
    # The other tensors lie so many words from the first; where that is a multiple of 16, loads are wide.
    shift = tl.where(which == 0, 0, tl.where(which == 1, second, third)).to(tl.int64)
    total = tl.zeros([BLOCK], dtype=tl.uint64)
    nonfinite = tl.zeros([BLOCK], dtype=tl.int32)
    for turn in range(ROUNDS):
        place = (program * ROUNDS + turn) * BLOCK + tl.arange(0, BLOCK)
        inside = place < count
        word = tl.load(words + shift + place, mask=inside, other=0).to(tl.uint64, bitcast=True)
        z = word + (place + start).to(tl.uint64) * 0x9E3779B97F4A7C15
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB
        z = z ^ (z >> 31)
        total += tl.where(inside, z, 0)
        if FINITE:
            low = (word.to(tl.uint32) & 0x7F800000) == 0x7F800000
            high = ((word >> 32).to(tl.uint32) & 0x7F800000) == 0x7F800000
            nonfinite += low.to(tl.int32) + high.to(tl.int32)
    # Integer addition commutes to the bit, so the order of these is not part of the result.
    tl.atomic_add(out + 2 * which, tl.sum(total, axis=0).to(tl.int64, bitcast=True))
    if FINITE:
        tl.atomic_add(out + 2 * which + 1, tl.sum(nonfinite.to(tl.int64), axis=0))


def word_sum_on_device(words: torch.Tensor, start: int = 0) -> torch.Tensor:
    """0-dim int64 on the device, with the bits of the word sum of int64 `words` (contiguous), first at `start`."""
    return _launch([words], start, finite=False)[0, 0]


def word_sums_and_nonfinite(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """int64 [len(tensors), 2] on the device: of each int64 vector its word sum, and how many fp32 values (two a word)
    are NaN or infinite. Up to `MOST` vectors of one size."""
    return _launch(tensors, 0, finite=True)


def _launch(tensors: Sequence[torch.Tensor], start: int, *, finite: bool) -> torch.Tensor:
    words = tensors[0]
    count = words.numel()
    shifts = [(tensor.data_ptr() - words.data_ptr()) // _WORD for tensor in tensors] + [0] * (MOST - len(tensors))
    rounds = _ROUNDS_SMALL if count < _SMALL_WORDS else _ROUNDS_LARGE
    programs = max(1, triton.cdiv(count, _BLOCK * rounds))
    out = torch.zeros((len(tensors), 2), dtype=torch.int64, device=words.device)
    _mixed_sums[(programs, len(tensors))](
        words, out, shifts[1], shifts[2], count, start, _BLOCK, rounds, finite, num_warps=_WARPS
    )
    return out
