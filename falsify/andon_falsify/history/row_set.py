"""A set of row ids in little memory: an epoch may visit millions of rows."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from itertools import compress

from andon_falsify.history.fields import RowId

_MOST_FLAGS = 1 << 26


class RowSet:
    """A set that holds an integer below 2**26 in one byte; a set of Python takes 70 bytes for each.

    Other ids (text, larger integers, negative ones) are in a set of Python.
    """

    def __init__(self, rows: Iterable[RowId] = ()) -> None:
        self._flags = bytearray()
        self._others: set[RowId] = set()
        self._size = 0
        self.add(rows)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RowSet):
            return NotImplemented
        return self._others == other._others and self._flags.rstrip(b"\0") == other._flags.rstrip(b"\0")

    __hash__ = None  # type: ignore[assignment]  # it changes

    def __len__(self) -> int:
        return self._size

    def add(self, rows: Iterable[RowId]) -> bool:
        """Add `rows`, and return whether all of them were new."""
        flags, others, new = self._flags, self._others, True
        for row in rows:
            if isinstance(row, int) and 0 <= row < _MOST_FLAGS:
                if row >= len(flags):
                    flags.extend(bytes(2 * row - len(flags) + 1024))
                known, flags[row] = flags[row], 1
            else:
                known = row in others
                others.add(row)
            self._size += not known
            new = new and not known
        return new

    def integers(self) -> array[int]:
        """Its integers in rising order, 8 bytes each."""
        others = sorted(row for row in self._others if isinstance(row, int))
        found = array("q", (row for row in others if row < 0))
        found.extend(compress(range(len(self._flags)), self._flags))
        found.extend(row for row in others if row > 0)
        return found
