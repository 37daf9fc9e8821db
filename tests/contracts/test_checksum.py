"""The checksum of flat memory: what it sees, on memory of every length, dtype and alignment."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from andon_contracts.checksum import ROW, STRIDE, Summed, checksum, room_of

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


def _every_second(change: torch.Tensor) -> torch.Tensor:
    return change.view(-1, 2)[:, 1]


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_what_changes_only_top_bits_is_seen(rows: int) -> None:
    for start in (torch.zeros(rows * ROW * 2), torch.randn(rows * ROW * 2)):
        other = start.clone()
        _every_second(other).neg_()
        assert not torch.equal(other.view(torch.int32), start.view(torch.int32))
        assert checksum(other) != checksum(start)


def test_exchanged_words_rows_and_lines_are_seen() -> None:
    words = _random(6 * ROW * STRIDE)
    seen = {checksum(words)}
    for one, other in ((0, 1), (5, 5 + ROW), (5, 5 + STRIDE), (7, 7 + ROW * STRIDE)):
        swapped = words.clone()
        swapped[one], swapped[other] = words[other].clone(), words[one].clone()
        seen.add(checksum(swapped))
    for width in (ROW, STRIDE, 128):
        rows = words[: 128 * width].view(-1, width).clone()
        columns = rows.clone()
        rows[[0, 4]] = rows[[4, 0]]
        columns[:, [3, 9]] = columns[:, [9, 3]]
        seen |= {checksum(words[: 128 * width]), checksum(rows.view(-1)), checksum(columns.view(-1))}
    for width in (ROW, 64, 128):
        corners = words.clone()
        for place, change in ((3, 1), (9, -1), (4 * width + 3, -1), (4 * width + 9, 1)):
            corners[place] += change
        seen.add(checksum(corners))
    assert len(seen) == 1 + 4 + 3 * 3 + 3


# Memory that is summed as it is copied, piece by piece.

SIZES = (8 * ROW * STRIDE, 5, 8 * STRIDE, 8 * ROW * 2 + 3)
"""Bytes: whole rows and lines, less than a word, one line, rows with a rest."""


def _summed(pieces: Sequence[Tensor]) -> int:
    sizes = [piece.numel() for piece in pieces]
    room = torch.full((max(map(room_of, sizes)),), -1)
    summed = Summed(sizes, room)
    for index, piece in enumerate(pieces):
        room[: room_of(piece.numel())] = 0
        room.view(torch.uint8)[: piece.numel()] = piece
        summed.take(index)
    return summed.fold()


def _pieces() -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(256, (size,), generator=generator).to(torch.uint8) for size in SIZES]


def test_a_bit_of_any_piece_that_is_summed_as_it_is_copied_is_seen() -> None:
    before = _summed(_pieces())
    assert _summed(_pieces()) == before
    seen = {before}
    for index in range(len(SIZES)):
        for place in (0, -1):
            changed = _pieces()
            changed[index][place] ^= 1
            seen.add(_summed(changed))
    words = _pieces()
    words[0][:8], words[2][:8] = words[2][:8].clone(), words[0][:8].clone()
    seen.add(_summed(words))
    assert len(seen) == 1 + 2 * len(SIZES) + 1
