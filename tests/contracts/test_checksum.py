"""The checksum of flat memory: what it sees, on memory of every length, dtype and alignment."""

from __future__ import annotations

import pytest
import torch

from andon_contracts.checksum import ROW, STRIDE, checksum

LENGTHS = (0, 1, 2, ROW, STRIDE - 1, STRIDE, STRIDE + 1, 5 * ROW, 5 * STRIDE, ROW * STRIDE, (1 << 19) + 3)
"""In words: less than a row, whole rows or lines, with a rest of either, more than is folded at once."""


def _random(words: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(1 << 62), 1 << 62, (words,), generator=generator)


@pytest.mark.parametrize("length", LENGTHS)
def test_one_bit_anywhere_is_seen(length: int) -> None:
    words = _random(length)
    seen = {checksum(words)}
    places = sorted({0, length // 2, length - 1}) if length else []
    for place in places:
        for bit in (1, -(1 << 63)):
            words[place] ^= bit
            seen.add(checksum(words))
            words[place] ^= bit
    assert len(seen) == 1 + 2 * len(places)
    assert checksum(words) in seen


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.complex128])
def test_the_same_bytes_have_one_checksum_wherever_they_lie(dtype: torch.dtype) -> None:
    raw = _random(3 * ROW).view(torch.uint8)
    width = dtype.itemsize
    for count in (0, 1, 8 * STRIDE // width + 1, raw.numel() // width):
        size = count * width
        shifted = torch.empty(size + width, dtype=torch.uint8)
        shifted[width:] = raw[:size]
        assert checksum(raw[:size].clone().view(dtype)) == checksum(shifted.view(dtype)[1:])


