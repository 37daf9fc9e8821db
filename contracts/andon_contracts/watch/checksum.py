"""A checksum of flat memory that a CPU computes at the speed of one multiplication a word.

The digest of `andon_contracts.digest` mixes every word, which costs a dozen passes where torch has no kernel for it. A
watch compares the memory of ranks several times a step, and needs only that a difference is seen. So the 64-bit words
are laid out in rows of `COLUMNS`, and two sums are kept, modulo 2^64: of each row, weighted by an odd random weight
for each column; and of each column, without weights. These sums, and the words of a last row that is not full, are
folded into one integer by multilinear hashing of their halves (Carter and Wegman, 1979; Lemire and Kaser, 2014).

A difference in up to three words is never lost in the sums, since some row or some column has exactly one of them; nor
is one in the top bit of every word of a row, since their number is odd. A larger one is lost only where it cancels in
every row under the weights and in every column without. What is not lost is missed by the fold with a probability of
at most 2^-33. The value does not depend on the order of summation. It is not a cryptographic digest.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from andon_contracts.digest import mix64, mix_integer

COLUMNS = 129
_ROWS = 4096
"""Rows that are folded at once, about 4 MiB."""
_WORD = 8
_HALF = 32


@functools.cache
def _weights() -> tuple[Tensor, Tensor, Tensor]:
    """Random weights: odd ones of the columns, and those of the low and of the high halves of what is folded."""
    longest = _ROWS + 2 * COLUMNS
    words = mix64(torch.arange(1, COLUMNS + 2 * longest + 1, dtype=torch.int64))
    across, low, high = torch.split(words, [COLUMNS, longest, longest])
    return across | 1, low, high


def _copied(flat: Tensor) -> Tensor:
    """The bytes of `flat` as int64 words of their own, the last one filled up with zeros."""
    raw = flat.view(torch.uint8)
    words = torch.zeros(-(-raw.numel() // _WORD), dtype=torch.int64)
    words.view(torch.uint8)[: raw.numel()] = raw
    return words


def _words(flat: Tensor) -> tuple[Tensor, Tensor]:
    """The bytes of `flat` as int64 words: those in place, where its memory is aligned to words, and those copied."""
    width = flat.element_size()
    if flat.storage_offset() * width % _WORD or flat.data_ptr() % _WORD:
        return _copied(flat), _copied(flat[:0])
    whole = flat.numel() - flat.numel() % max(1, _WORD // width)
    return flat[:whole].view(torch.int64), _copied(flat[whole:])


def _fold(sums: Tensor) -> int:
    _, low, high = _weights()
    count = sums.numel()
    return int(torch.dot(sums, low[:count])) + int(torch.dot(sums >> _HALF, high[:count]))


def checksum(flat: Tensor) -> int:
    """The checksum in [0, 2^64) of the bytes of `flat`: 1-dim, contiguous, of any dtype, on a CPU."""
    words, last = _words(flat)
    rows = words.numel() // COLUMNS
    rest = words[rows * COLUMNS :]
    rest = torch.cat([rest, last]) if last.numel() else rest
    if not rows:
        return mix_integer(_fold(rest))
    across = _weights()[0]
    total = 0
    for block in torch.split(words[: rows * COLUMNS].view(rows, COLUMNS), _ROWS):
        rows -= block.shape[0]
        parts = [torch.mv(block, across), block.sum(0)]
        total = mix_integer(total + _fold(torch.cat(parts if rows else [*parts, rest])))
    return total
