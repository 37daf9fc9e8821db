"""Rows of text with a class, and data sets of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True, slots=True)
class Row:
    """One text and its class. `id` is the row's place in what it was read from, from 0, and never changes."""

    id: int
    text: str
    label: int


@dataclass(frozen=True)
class DataSet:
    """Rows, the names of their classes (`rows[i].label` is an index into `labels`), and where they came from."""

    rows: tuple[Row, ...]
    labels: tuple[str, ...]
    source: str

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) of every text and class name in order, each with its length before it."""
        sha = hashlib.sha256()
        for row in self.rows:
            for part in (row.text, self.labels[row.label]):
                encoded = part.encode("utf-8")
                sha.update(len(encoded).to_bytes(8, "little"))
                sha.update(encoded)
        return sha.hexdigest()

    @cached_property
    def _by_id(self) -> dict[int, Row]:
        return {row.id: row for row in self.rows}

    def counts(self) -> tuple[int, ...]:
        """Rows of each class, by label."""
        found = [0] * len(self.labels)
        for row in self.rows:
            found[row.label] += 1
        return tuple(found)

    def subset(self, ids: Iterable[int]) -> DataSet:
        """The rows with these ids, in the order of `ids`; they keep their ids. Raises KeyError for an id not here."""
        return DataSet(tuple(self._by_id[id_] for id_ in ids), self.labels, self.source)

    def repeated_texts(self) -> int:
        """How many rows have a text that an earlier row has (reported, not refused)."""
        return len(self.rows) - len({row.text for row in self.rows})

    def shared_texts(self, other: DataSet) -> int:
        """How many rows of `other` have a text that occurs here (training text in an evaluation set)."""
        texts = {row.text for row in self.rows}
        return sum(row.text in texts for row in other.rows)
