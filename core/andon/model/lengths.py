"""To how many tokens rows are padded, and which shapes micro-batches then have."""

from __future__ import annotations

from collections.abc import Collection

Shape = tuple[int, int]
"""Rows and padded length of a micro-batch."""


def padded_length(longest: int, multiple: int, limit: int | None = None) -> int:
    """Tokens to which rows of at most `longest` are padded: up to a multiple, and beyond `limit` only as they are."""
    length = -(-longest // multiple) * multiple
    return length if limit is None else max(longest, min(length, limit))


def shapes_of(batch_size: int, micro_batches: int, lengths: Collection[int]) -> frozenset[Shape]:
    """The shapes of full global batches: one or two numbers of rows, each of `lengths`."""
    rows = {batch_size // micro_batches, -(-batch_size // micro_batches)} - {0}
    return frozenset((count, length) for count in rows for length in lengths)


def length_step(max_length: int, count: int, multiple: int = 8) -> int:
    """The multiple to pad to so that there are at most `count` lengths up to `max_length`; itself one of `multiple`."""
    return padded_length(-(-max_length // count), multiple)


def padded_lengths(max_length: int, step: int) -> tuple[int, ...]:
    """The lengths to which rows of at most `max_length` tokens are padded."""
    return tuple(padded_length(length, step, max_length) for length in range(1, max_length + 1, step))
