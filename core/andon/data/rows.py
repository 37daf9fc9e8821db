"""Data sets of texts labelled with a class, a number, a set of labels, or tags."""

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
    """A text or a pair of texts. label: a class number, several label numbers, or a target number.

    id: the row's position among all usable rows, from 0.
    """

    id: int
    text: str
    label: Label
    pair: str | None = None

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.text,) if self.pair is None else (self.text, self.pair)


class Examples:
    """Rows of any task. The methods use in-memory `rows`; `TokenisedConversations` has none and overrides most."""

    rows: tuple[Any, ...]
    labels: tuple[str, ...]
    """The names of a model's outputs; empty for conversations."""
    source: str
    origins: Origins | None
    """File and line of each row, by id; None for generated rows."""

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of all content that training depends on."""
        raise NotImplementedError

    def texts(self) -> tuple[str, ...]:
        """The input text of each row, in order."""
        raise NotImplementedError

    def about(self) -> str:
        """A short summary, for example `5 classes`."""
        return "task sft"

    def told(self, id_: int) -> tuple[str, str] | None:
        """(target as text, input text) of a row; None for an unknown id. Not available for tokenised rows."""
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
        """The `fingerprint` of each row's input text."""
        return tuple(map(fingerprint, self.texts()))


def fingerprint(text: str) -> int:
    """A 64-bit digest of `text`. The collision probability among a billion texts is about 1 in 40."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest(), "little")


def repeated_texts(rows: Examples) -> int:
    """The number of rows that repeat the text of an earlier row."""
    return len(rows) - len({*rows.fingerprints()})


def shared_texts(rows: Examples, other: Examples) -> int:
    """The number of rows of `other` whose text also occurs in `rows`."""
    texts = {*rows.fingerprints()}
    return sum(text in texts for text in other.fingerprints())


@dataclass(frozen=True)
class TextRows(Examples, Generic[Label]):
    """Labelled texts. Each subclass is one kind of label; its `kind` is part of the digest."""

    rows: tuple[Row[Label], ...]
    labels: tuple[str, ...]
    source: str
    origins: Origins | None = field(default=None, compare=False, repr=False)
    kind: ClassVar[str] = ""

    def label_names(self, row: Row[Any]) -> tuple[str, ...]:
        """The names of the row's labels, or its target number as `repr`."""
        if isinstance(row.label, float):
            return (repr(row.label),)
        return tuple(self.labels[number] for number in _numbers(row.label))

    def counts(self) -> tuple[int, ...]:
        """The number of occurrences of each of `labels`; empty for regression."""
        counter = Counter(number for row in self.rows for number in _numbers(row.label))
        return tuple(counter[number] for number in range(len(self.labels)))

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
        """The same rows with classes numbered in the order of `labels`, a permutation of `self.labels`."""
        place = {name: number for number, name in enumerate(labels)}
        new = [place[name] for name in self.labels]
        rows: list[Row[Any]] = []
        for row in self.rows:
            label: Any = tuple(new[number] for number in _numbers(row.label))
            rows.append(replace(row, label=label if isinstance(row.label, tuple) else label[0]))
        return replace(self, rows=tuple(rows), labels=tuple(labels))

    def texts(self) -> tuple[str, ...]:
        """The rows' texts, in order; the texts of a pair are joined by a line feed."""
        return tuple("\n".join(row.texts) for row in self.rows)

    def told(self, id_: int) -> tuple[str, str] | None:
        row = self._by_id.get(id_)
        return None if row is None else (", ".join(self.label_names(row)) or "no label", "\n".join(row.texts))


def _numbers(label: Any) -> tuple[int, ...]:
    return label if isinstance(label, tuple) else (label,)


class DataSet(TextRows[int]):
    """Single-label classification: `label` is an index into `labels`."""

    def about(self) -> str:
        return f"{len(self.labels)} classes"


class LabelSets(TextRows[tuple[int, ...]]):
    """Multi-label classification: `label` has zero or more ascending indices into `labels`."""

    kind = "multi-label"

    def about(self) -> str:
        each = sum(len(row.label) for row in self.rows) / len(self.rows)
        return f"{len(self.labels)} labels, {each:.2f} of them a row"


class Tagged(TextRows[tuple[int, ...]]):
    """Token classification: the text is words joined by spaces, `label` has the tag number of each word."""

    kind = "token-classification"

    def about(self) -> str:
        return f"{len(self.labels)} tags of {sum(len(row.label) for row in self.rows)} words"


class Targets(TextRows[float]):
    """Regression: `label` is a finite number; `labels` names the single output."""

    kind = "regression"

    def counts(self) -> tuple[int, ...]:
        return ()

    def about(self) -> str:
        return f"numbers from {min(row.label for row in self.rows):g} to {max(row.label for row in self.rows):g}"
