"""The checksum of flat memory: what it sees, on memory of every length, dtype and alignment."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from andon_contracts.checksum import MOST_SUMS, ROW, STRIDE, Summed, checksum, room_of

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


@given(st.lists(st.tuples(st.integers(0, 4 * STRIDE + 9), st.integers(0, 63)), min_size=1, max_size=3, unique=True))
def test_few_flipped_bits_are_seen(flips: list[tuple[int, int]]) -> None:
    words = torch.zeros(4 * STRIDE + 10, dtype=torch.int64)
    before = checksum(words)
    for place, bit in flips:
        words[place] ^= -(1 << 63) if bit == 63 else 1 << bit
    assert checksum(words) != before


@pytest.mark.parametrize("length", [5, 3 * STRIDE + 4])
def test_the_value_is_the_one_of_the_definition(length: int) -> None:
    words = _random(length).tolist()
    longest = (1 << 19) // ROW + 3 * STRIDE
    weights = [_mixed(index + 1) for index in range(2 * longest)]
    rows, lines = length // ROW, length // STRIDE
    sums = [sum(words[row * ROW : (row + 1) * ROW]) for row in range(rows)] if lines else []
    sums += [sum(words[place : lines * STRIDE : STRIDE]) for place in range(STRIDE)] if lines else []
    sums += words[min(rows * ROW, lines * STRIDE) :]
    halves = [half for value in sums for half in (_signed(value, 32), _signed(value >> 32, 32))]
    total = sum(half * weight for half, weight in zip(halves, weights, strict=False))
    assert checksum(torch.tensor(words)) == _mixed(total % (1 << 64))


def _signed(value: int, bits: int) -> int:
    value %= 1 << bits
    return value - (1 << bits) if value >> (bits - 1) else value


def _mixed(value: int) -> int:
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value = (value ^ (value >> shift)) * factor % (1 << 64)
    return value ^ (value >> 31)


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


def test_the_sums_of_pieces_are_those_of_their_definition() -> None:
    weights = [_mixed(index + 1) for index in range(2 * MOST_SUMS)]
    halves: list[int] = []
    for piece in _pieces():
        filled = bytes(piece.tolist()).ljust(8 * ROW * STRIDE, b"\0")
        words = [int.from_bytes(filled[place : place + 8], "little") for place in range(0, len(filled), 8)]
        rows = [sum(words[place : place + ROW]) for place in range(0, -(-piece.numel() // 8), ROW)]
        for value in [*rows, *(sum(words[place::STRIDE]) for place in range(STRIDE))]:
            bits = (value % (1 << 64)).to_bytes(8, "little")
            halves += [int.from_bytes(half, "little", signed=True) for half in (bits[:4], bits[4:])]
    total = sum(half * weight for half, weight in zip(halves, weights, strict=False))
    assert _summed(_pieces()) == _mixed(total % (1 << 64))
