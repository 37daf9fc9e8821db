"""Rows of text with a class, data sets of them, and the split of one that is drawn once and kept."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from andon.console.problems import InputError


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


def frozen_split(count: int, fraction: float, seed: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Places 0 to `count` - 1 as (train, validation), both ascending, disjoint and together complete.

    The same for the same seed, so on every start of a run.

    Validation holds round(count * fraction) places, but at least 1 and at most count - 1; with `fraction` 0 none.
    Only `Random.random` is used, whose sequence Python keeps between versions.
    Raises `InputError` for a fraction outside [0, 1), and where no row would remain to train on.
    """
    if not 0.0 <= fraction < 1.0:
        raise InputError(f"the validation fraction must be at least 0 and less than 1 ({fraction})")
    if fraction == 0.0:
        return tuple(range(count)), ()
    if count < 2:
        raise InputError(f"a validation split needs at least 2 rows, there are {count}; set data.validation_fraction=0")
    draw = random.Random(f"andon validation split {seed}").random
    order = sorted((draw(), place) for place in range(count))
    held = min(max(round(count * fraction), 1), count - 1)
    validation = {place for _, place in order[:held]}
    return tuple(place for place in range(count) if place not in validation), tuple(sorted(validation))
