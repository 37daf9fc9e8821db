"""A checksum of flat memory that a CPU computes at the speed of two additions a word.

The digest of `andon_contracts.digest` mixes every word, which costs a dozen passes where torch has no kernel for it. A
watch compares the memory of ranks several times a step, and needs only that a difference is seen. So of the 64-bit
words two kinds of sums are kept, modulo 2^64: one of each `ROW` consecutive words, and one of all words that are
`STRIDE` apart. These sums, and the words at the end that one of the two layouts leaves over, are folded into one
integer by multilinear hashing of their halves (Carter and Wegman, 1979; Lemire and Kaser, 2014).

Two words of a row are never of one stride, so a difference in up to three words is never lost in the sums: some sum has
exactly one of them. Nor is one in the top bit of every word of a row, since their number is odd. A larger one is lost
only where it cancels in every row and in every stride; both are odd lengths, unlike those of anything in memory. What
is not lost is missed by the fold with a probability of at most 2^-33. The value does not depend on the order of
summation. It is not a cryptographic digest.

`PieceSums` does the same for memory that is copied together piece by piece: each piece, filled up with zeros to whole rows
and lines, is summed while it is still in a cache, and the sums of all are folded once.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from andon_contracts.digest import WORD, mix64, mix_integer

ROW, STRIDE = 129, 131
_BLOCK = 1 << 19
"""Words that are folded at once: 4 MiB."""
MAX_SUMS = _BLOCK // ROW + 3 * STRIDE
"""So many sums are folded at once."""


@functools.cache
def _weights() -> Tensor:
    """Random weights of the halves of the words that are folded."""
    return mix64(torch.arange(1, 2 * MAX_SUMS + 1, dtype=torch.int64, device="cpu"))


def _fold(sums: Tensor) -> int:
    halves = sums.view(torch.int32).to(torch.int64)
    return int(torch.dot(halves, _weights()[: halves.numel()]))


def _sums(words: Tensor) -> Tensor:
    """What is folded of at most `_BLOCK` words."""
    rows, lines = words.numel() // ROW, words.numel() // STRIDE
    if not lines:
        return words
    by_row = words.as_strided((rows, ROW), (ROW, 1)).sum(1)
    by_line = words.as_strided((lines, STRIDE), (STRIDE, 1)).sum(0)
    return torch.cat([by_row, by_line, words[min(rows * ROW, lines * STRIDE) :]])


def checksum(flat: Tensor) -> int:
    """The checksum in [0, 2^64) of the bytes of `flat`: 1-dim, contiguous, of any dtype, on a CPU."""
    over = flat.nbytes % WORD
    aligned = not (flat.storage_offset() * flat.element_size() % WORD or flat.data_ptr() % WORD)
    if aligned and not over:
        words = flat.view(torch.int64)
    else:
        raw = flat.view(torch.uint8)
        whole = raw[: raw.numel() - over]
        words = (whole if aligned else whole.clone()).view(torch.int64)
    total = 0
    for block in torch.split(words, _BLOCK) if words.numel() > _BLOCK else (words,):
        total = mix_integer(total + _fold(_sums(block)))
    if over:
        last = torch.zeros(WORD, dtype=torch.uint8, device="cpu")
        last[:over] = raw[-over:]
        total = mix_integer(total + _fold(last.view(torch.int64)))
    return total


class PieceSums:
    """The checksums of pieces of memory that are copied into `room` one after the other. Their sizes never change."""

    def __init__(self, sizes: Sequence[int], room: Tensor) -> None:
        """sizes: of the pieces, in bytes; room: 1-dim int64 on a CPU with `padded_words` words for the largest."""
        self._pieces: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        batches: list[tuple[Tensor, int]] = []
        for size in sizes:
            rows, lines = _whole(size, ROW), _whole(size, STRIDE)
            count = rows + STRIDE
            if not batches or batches[-1][1] + count > MAX_SUMS:
                batches.append((torch.zeros(MAX_SUMS, dtype=torch.int64, device="cpu"), 0))
            sums, place = batches[-1]
            of_rows, of_lines = torch.split(sums[place : place + count], [rows, STRIDE])
            by_row, by_line = room[: rows * ROW].view(rows, ROW), room[: lines * STRIDE].view(lines, STRIDE)
            self._pieces.append((by_row, of_rows, by_line, of_lines))
            batches[-1] = sums, place + count
        self._batches = [(sums[:count].view(torch.int32), _weights()[: 2 * count]) for sums, count in batches]

    def take(self, piece: int) -> None:
        """The room begins with the bytes of this piece now, and with zeros behind them, to `padded_words` words."""
        by_row, of_rows, by_line, of_lines = self._pieces[piece]
        torch.sum(by_row, 1, out=of_rows)
        torch.sum(by_line, 0, out=of_lines)

    def fold(self) -> list[int]:
        """One checksum in [0, 2^64) for each run of pieces that have at most `MAX_SUMS` sums, after all were taken."""
        return [mix_integer(int(torch.dot(halves.to(torch.int64), weights))) for halves, weights in self._batches]


def _whole(size: int, length: int) -> int:  # how many rows or lines of `length` words hold `size` bytes
    return -(-size // (length * WORD))


def padded_words(size: int) -> int:
    """How many words a piece of `size` bytes takes with the zeros behind it."""
    return max(_whole(size, ROW) * ROW, _whole(size, STRIDE) * STRIDE)
