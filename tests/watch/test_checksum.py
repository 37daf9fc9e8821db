"""The checksum of flat memory: what it sees, on memory of every length, dtype and alignment."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from andon_contracts.watch.checksum import COLUMNS, checksum

LENGTHS = (0, 1, 2, 3, COLUMNS - 1, COLUMNS, COLUMNS + 1, 5 * COLUMNS, 4097 * COLUMNS + 3)
"""In words: less than a row, whole rows, rows and a rest, more rows than are folded at once."""


def _random(words: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(1 << 62), 1 << 62, (words,), generator=generator)


@pytest.mark.parametrize("length", LENGTHS)
def test_one_bit_anywhere_is_seen(length: int) -> None:
    """The lowest and the highest bit of the first, the middle and the last word each give another checksum."""
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
    """Memory that starts between two words, or ends between two, counts by its bytes alone."""
    raw = _random(3 * COLUMNS).view(torch.uint8)
    width = dtype.itemsize
    for count in (0, 1, 8 * COLUMNS // width + 1, raw.numel() // width):
        size = count * width
        shifted = torch.empty(size + width, dtype=torch.uint8)
        shifted[width:] = raw[:size]
        assert checksum(raw[:size].clone().view(dtype)) == checksum(shifted.view(dtype)[1:])


def _every_second(change: torch.Tensor) -> torch.Tensor:
    return change.view(-1, 2)[:, 1]


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_what_changes_only_top_bits_is_seen(rows: int) -> None:
    """Half of all signs flipped, as in a conjugate: each word changes in its top bit alone, in whole rows."""
    for start in (torch.zeros(rows * COLUMNS * 2), torch.randn(rows * COLUMNS * 2)):
        other = start.clone()
        _every_second(other).neg_()
        assert not torch.equal(other.view(torch.int32), start.view(torch.int32))
        assert checksum(other) != checksum(start)


def test_exchanged_words_rows_and_columns_are_seen() -> None:
    """The same words in another order: two neighbours, two rows, two columns, two corners with two."""
    words = _random(6 * COLUMNS)
    table = words.view(6, COLUMNS)
    seen = {checksum(words)}
    for one, other in (((0, 0), (0, 1)), ((1, 5), (3, 5))):
        swapped = table.clone()
        swapped[one], swapped[other] = table[other].clone(), table[one].clone()
        seen.add(checksum(swapped.view(-1)))
    rows, columns, corners = table.clone(), table.clone(), torch.zeros_like(table)
    rows[[0, 4]] = table[[4, 0]]
    columns[:, [3, 9]] = table[:, [9, 3]]
    corners[0, 3] = corners[4, 9] = 1
    crossed = torch.zeros_like(table)
    crossed[0, 9] = crossed[4, 3] = 1
    seen |= {checksum(each.view(-1)) for each in (rows, columns, corners, crossed)}
    assert len(seen) == 7


@given(st.lists(st.tuples(st.integers(0, 4 * COLUMNS + 9), st.integers(0, 63)), min_size=1, max_size=3, unique=True))
def test_few_flipped_bits_are_seen(flips: list[tuple[int, int]]) -> None:
    """Up to three bits, wherever they are, in the same word, row or column or not."""
    words = torch.zeros(4 * COLUMNS + 10, dtype=torch.int64)
    before = checksum(words)
    for place, bit in flips:
        words[place] ^= -(1 << 63) if bit == 63 else 1 << bit
    assert checksum(words) != before


def test_the_value_is_the_one_of_the_definition() -> None:
    """Row sums under weights, column sums and the rest, folded by halves: written out in Python's integers."""
    words = _random(3 * COLUMNS + 4).tolist()
    weights = [_mixed((index + 1) % (1 << 64)) for index in range(COLUMNS + 2 * (4096 + 2 * COLUMNS))]
    across, folding = [w | 1 for w in weights[:COLUMNS]], weights[COLUMNS:]
    table = [words[row * COLUMNS : (row + 1) * COLUMNS] for row in range(3)]
    sums = [sum(a * w for a, w in zip(across, row, strict=True)) for row in table]
    sums += [sum(column) for column in zip(*table, strict=True)]
    sums = [_signed(value) for value in sums + words[3 * COLUMNS :]]
    low, high = folding[: len(folding) // 2], folding[len(folding) // 2 :]
    total = sum(value * a + (value >> 32) * b for value, a, b in zip(sums, low, high, strict=False))
    assert checksum(torch.tensor(words)) == _mixed(total % (1 << 64))


def _signed(value: int) -> int:
    value %= 1 << 64
    return value - (1 << 64) if value >> 63 else value


def _mixed(value: int) -> int:
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value = (value ^ (value >> shift)) * factor % (1 << 64)
    return value ^ (value >> 31)
