"""What all data sets have in common; those of texts with a class or a number; and the split of one, drawn once."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

from andon.console.problems import InputError
from andon.data.origins import Origins

Label = TypeVar("Label", covariant=True)


@dataclass(frozen=True, slots=True)
class Row(Generic[Label]):
    """One text, or a pair of them, and what is learned of it: a class as its number, a number as it is.

    `id` is the row's place in what it was read from, from 0, and never changes.
    """

    id: int
    text: str
    label: Label
    pair: str | None = None

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.text,) if self.pair is None else (self.text, self.pair)


class Examples(Protocol):
    """Rows of any task: each has an id, and the fingerprint of a text."""

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of a model's outputs: of the classes, where there are any."""
        ...

    @property
    def source(self) -> str:
        """Where they came from."""
        ...

    @property
    def origins(self) -> Origins | None:
        """Where each row came from, by its id; None where that is no file."""
        ...

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of all that is learned from."""
        ...

    @property
    def ids(self) -> tuple[int, ...]:
        """The rows' ids, in order."""
        ...

    def __len__(self) -> int: ...

    def subset(self, ids: Iterable[int]) -> Self:
        """The rows with these ids, in the order of `ids`; they keep their ids. Raises KeyError for an id not here."""
        ...

    def fingerprints(self) -> tuple[int, ...]:
        """A number for what a model is asked of each row, in order: two rows with one text have the same."""
        ...

    def about(self) -> str:
        """What is to be learned, in a few words: `5 classes`."""
        ...

    def told(self, id_: int) -> tuple[str, str] | None:
        """What is to be learned of a row and what is asked, for a reader; None for an id whose text is not held."""
        ...


def fingerprint(text: str) -> int:
    """64 bits of a digest of `text`: of a billion texts some two are taken for one in one case of forty."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest(), "little")


def repeated_texts(rows: Examples) -> int:
    """How many rows have a text that an earlier row has (reported, not refused)."""
    return len(rows) - len({*rows.fingerprints()})


def shared_texts(rows: Examples, other: Examples) -> int:
    """How many rows of `other` have a text that occurs in `rows` (training text in an evaluation set)."""
    texts = {*rows.fingerprints()}
    return sum(text in texts for text in other.fingerprints())


def _renumbered(label: Any, new: Sequence[int]) -> Any:
    """The number of a class, or of each of several, as `new` has it by the old number."""
    return tuple(new[number] for number in label) if isinstance(label, tuple) else new[label]


class RowsById:
    """What data sets that hold their rows have in common."""

    rows: tuple[Any, ...]

    def texts(self) -> tuple[str, ...]:
        """What a model is asked by each row, in order."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def _by_id(self) -> dict[int, Any]:
        return {row.id: row for row in self.rows}

    def subset(self, ids: Iterable[int]) -> Self:
        return replace(self, rows=tuple(self._by_id[id_] for id_ in ids))  # type: ignore[type-var]

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(row.id for row in self.rows)

    def fingerprints(self) -> tuple[int, ...]:
        return tuple(map(fingerprint, self.texts()))


@dataclass(frozen=True)
class TextRows(RowsById, Generic[Label]):
    """Rows of texts, the names of a model's outputs, and where the rows came from."""

    rows: tuple[Row[Label], ...]
    labels: tuple[str, ...]
    source: str
    origins: Origins | None = field(default=None, compare=False, repr=False)
    kind: ClassVar[str] = ""
    """What keeps the digests of two tasks over the same texts apart."""

    def said(self, row: Row[Label]) -> tuple[str, ...]:
        raise NotImplementedError

    def about(self) -> str:
        """What is to be learned, in a few words."""
        raise NotImplementedError

    def counts(self) -> tuple[int, ...]:
        """For each of `labels` how often it is there to be learned; empty for rows without classes."""
        return ()

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) of every text and what is learned of it in order, each part with its length before it."""
        sha = hashlib.sha256(self.kind.encode())
        for row in self.rows:
            for part in (*row.texts, *self.said(row)):
                encoded = part.encode("utf-8")
                sha.update(len(encoded).to_bytes(8, "little"))
                sha.update(encoded)
        return sha.hexdigest()

    def numbered_by(self, labels: Sequence[str]) -> Self:
        """The same rows with their classes numbered in the order of `labels`, which are the same names."""
        new = [labels.index(name) for name in self.labels]
        rows = (replace(row, label=_renumbered(row.label, new)) for row in self.rows)
        return replace(self, rows=tuple(rows), labels=tuple(labels))

    def texts(self) -> tuple[str, ...]:
        """The rows' texts, in order; those of a pair on a line each."""
        return tuple("\n".join(row.texts) for row in self.rows)

    def told(self, id_: int) -> tuple[str, str] | None:
        row = self._by_id.get(id_)
        return None if row is None else (", ".join(self.said(row)), "\n".join(row.texts))


@dataclass(frozen=True)
class DataSet(TextRows[int]):
    """Texts with a class each: `rows[i].label` is an index into `labels`."""

    def said(self, row: Row[int]) -> tuple[str, ...]:
        return (self.labels[row.label],)

    def about(self) -> str:
        return f"{len(self.labels)} classes"

    def counts(self) -> tuple[int, ...]:
        found = [0] * len(self.labels)
        for row in self.rows:
            found[row.label] += 1
        return tuple(found)


@dataclass(frozen=True)
class LabelSets(TextRows[tuple[int, ...]]):
    """Texts with any number of labels each, none too: indices into `labels`, in the order of the names."""

    kind: ClassVar[str] = "multi-label"

    def said(self, row: Row[tuple[int, ...]]) -> tuple[str, ...]:
        """How many labels the row has, and their names."""
        return (str(len(row.label)), *(self.labels[number] for number in row.label))

    def about(self) -> str:
        each = sum(len(row.label) for row in self.rows) / len(self.rows)
        return f"{len(self.labels)} labels, {each:.2f} of them a row"

    def counts(self) -> tuple[int, ...]:
        found = Counter(number for row in self.rows for number in row.label)
        return tuple(found[number] for number in range(len(self.labels)))

    def told(self, id_: int) -> tuple[str, str] | None:
        """The names of a row's labels, and its text; None for an id not here."""
        row = self._by_id.get(id_)
        return None if row is None else (", ".join(self.said(row)[1:]) or "no label", "\n".join(row.texts))


VALUE = ("value",)
"""The one output of a model of numbers."""


@dataclass(frozen=True)
class Targets(TextRows[float]):
    """Texts with a finite number each."""

    kind: ClassVar[str] = "regression"

    def said(self, row: Row[float]) -> tuple[str, ...]:
        """The row's number, as short as it can be read back to the same."""
        return (repr(row.label),)

    def about(self) -> str:
        return f"numbers from {min(row.label for row in self.rows):g} to {max(row.label for row in self.rows):g}"


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
