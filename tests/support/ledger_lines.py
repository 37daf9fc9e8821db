"""The lines of a ledger as bytes, verified without its reader."""

from __future__ import annotations

from collections.abc import Iterable

from andon_contracts.record import GENESIS, chain, decode_line


def verify_chain(lines: Iterable[bytes]) -> tuple[int, str]:
    """Check that `lines` are whole, in sequence and linked; return their head, the count and the last line's digest.

    The head of no lines is `(0, GENESIS)`. Raises `ValueError` naming the first line (from 1) that does not fit.
    """
    count, head = 0, GENESIS
    for line in lines:
        try:
            decode_line(line, count, head)
        except ValueError as error:
            raise ValueError(f"line {count + 1}: {error}") from None
        count, head = count + 1, chain(line)
    return count, head
