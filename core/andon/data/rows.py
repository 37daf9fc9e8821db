"""Data sets of texts with a class, a number, a set of labels or tags."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Generic, Self, TypeVar

from andon.data.origins import Origins

Label = TypeVar("Label", covariant=True)


@dataclass(frozen=True, slots=True)
class Row(Generic[Label]):
    """A text or a pair of texts with its label: a class number, several of them, or a target number.

    `id` is the row's position among all rows that were read, from 0.
    """

    id: int
    text: str
    label: Label
    pair: str | None = None

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.text,) if self.pair is None else (self.text, self.pair)


class Examples:
    """Rows of any task. This class works on `rows` held in memory; tokenised conversations override its methods."""

    rows: tuple[Any, ...]
    labels: tuple[str, ...]
    """The names of a model's outputs; empty for conversations."""
    source: str
    origins: Origins | None
    """File and line of each row, by its id; None for generated rows."""

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of all that is learned from."""
        raise NotImplementedError

    def texts(self) -> tuple[str, ...]:
        """The input text of each row, in order."""
        raise NotImplementedError

    def about(self) -> str:
        """The content in a few words, for example `5 classes`."""
        return "task sft"

    def told(self, id_: int) -> tuple[str, str] | None:
        """What is learned of a row, and its input text; None for an unknown id or a row without its text."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def _by_id(self) -> dict[int, Any]:
        return {row.id: row for row in self.rows}

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(row.id for row in self.rows)

    def subset(self, ids: Iterable[int]) -> Self:
        """The rows with these ids, in the order of `ids`; they keep their ids. Raises KeyError for an unknown id."""
        return replace(self, rows=tuple(self._by_id[id_] for id_ in ids))  # type: ignore[type-var]

    def fingerprints(self) -> tuple[int, ...]:
        """64 bits of a digest of each row's input text: equal texts have equal fingerprints."""
        return tuple(map(fingerprint, self.texts()))


def fingerprint(text: str) -> int:
    """64 bits of a digest of `text`. Among a billion texts two collide with a chance of 1 in 40."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest(), "little")


def repeated_texts(rows: Examples) -> int:
    """How many rows repeat the text of an earlier row."""
    return len(rows) - len({*rows.fingerprints()})


def shared_texts(rows: Examples, other: Examples) -> int:
    """How many rows of `other` have a text that occurs in `rows`."""
    texts = {*rows.fingerprints()}
    return sum(text in texts for text in other.fingerprints())


@dataclass(frozen=True)
class TextRows(Examples, Generic[Label]):
    """Rows of texts. A subclass stands for one kind of label; `kind` enters the digest."""

    rows: tuple[Row[Label], ...]
    labels: tuple[str, ...]
    source: str
    origins: Origins | None = field(default=None, compare=False, repr=False)
    kind: ClassVar[str] = ""

    def label_names(self, row: Row[Any]) -> tuple[str, ...]:
        """The names of the row's labels; a target number in its shortest exact form."""
        if isinstance(row.label, float):
            return (repr(row.label),)
        return tuple(self.labels[number] for number in _numbers(row.label))

    def counts(self) -> tuple[int, ...]:
        """How often each of `labels` occurs; empty for numbers."""
        found = Counter(number for row in self.rows for number in _numbers(row.label))
        return tuple(found[number] for number in range(len(self.labels)))

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) of every text and its labels in order, each part preceded by its length."""
        sha = hashlib.sha256(self.kind.encode())
        for row in self.rows:
            names = self.label_names(row)
            for part in (*row.texts, *((str(len(names)),) if isinstance(self, LabelSets) else ()), *names):
                encoded = part.encode("utf-8")
                sha.update(len(encoded).to_bytes(8, "little"))
                sha.update(encoded)
        return sha.hexdigest()

    def numbered_by(self, labels: Sequence[str]) -> Self:
        """The same rows with their classes numbered in the order of `labels`, a permutation of the own labels."""
        place = {name: number for number, name in enumerate(labels)}
        new = [place[name] for name in self.labels]
        rows: list[Row[Any]] = []
        for row in self.rows:
            label: Any = tuple(new[number] for number in _numbers(row.label))
            rows.append(replace(row, label=label if isinstance(row.label, tuple) else label[0]))
        return replace(self, rows=tuple(rows), labels=tuple(labels))

    def texts(self) -> tuple[str, ...]:
        """The rows' texts, in order; the two of a pair on a line each."""
        return tuple("\n".join(row.texts) for row in self.rows)

    def told(self, id_: int) -> tuple[str, str] | None:
        row = self._by_id.get(id_)
        return None if row is None else (", ".join(self.label_names(row)) or "no label", "\n".join(row.texts))


def _numbers(label: Any) -> tuple[int, ...]:
    return label if isinstance(label, tuple) else (label,)


class DataSet(TextRows[int]):
    """Texts with one class each: `label` is an index into `labels`."""

    def about(self) -> str:
        return f"{len(self.labels)} classes"


class LabelSets(TextRows[tuple[int, ...]]):
    """Texts with any number of labels each, also none: ascending indices into `labels`."""

    kind = "multi-label"

    def about(self) -> str:
        each = sum(len(row.label) for row in self.rows) / len(self.rows)
        return f"{len(self.labels)} labels, {each:.2f} of them a row"


class Tagged(TextRows[tuple[int, ...]]):
    """Rows of words: the text is the words joined by a space, the label is the tag number of each word."""

    kind = "token-classification"

    def about(self) -> str:
        return f"{len(self.labels)} tags of {sum(len(row.label) for row in self.rows)} words"


class Targets(TextRows[float]):
    """Texts with a finite number each. `labels` names the model's one output."""

    kind = "regression"

    def counts(self) -> tuple[int, ...]:
        return ()

    def about(self) -> str:
        return f"numbers from {min(row.label for row in self.rows):g} to {max(row.label for row in self.rows):g}"
