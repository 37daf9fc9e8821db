"""Data sets of texts labelled with a class, a number, a set of labels, or tags; their labels, split and order.

Random choices are seeded and the same on any machine.
"""

from __future__ import annotations

import hashlib
import math
import random
import re
import unicodedata
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from itertools import accumulate
from typing import Any, ClassVar, Generic, Literal, Self, TypeVar

from andon.console.messages import InputError, Problem, shown
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
        """A short summary, for example `5 classes`; empty for conversations."""
        return ""

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


def repeated_texts(rows: Examples) -> list[tuple[int, int]]:
    """(row, first row with the same text), by id, of each row that repeats the text of an earlier one."""
    first: dict[int, int] = {}
    pairs = [(id_, first.setdefault(text, id_)) for id_, text in zip(rows.ids, rows.fingerprints(), strict=True)]
    return [pair for pair in pairs if pair[0] != pair[1]]


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


_Item = TypeVar("_Item")


class Draw:
    """Random choices seeded by `name`. Uses only `Random.random`, whose sequence is stable across Python versions."""

    def __init__(self, name: str) -> None:
        self._random = random.Random(name).random

    def below(self, bound: int) -> int:
        """An integer from 0 to `bound` - 1."""
        return int(self._random() * bound)

    def pick(self, items: Sequence[_Item]) -> _Item:
        return items[self.below(len(items))]

    def shuffled(self, items: Sequence[_Item]) -> list[_Item]:
        keyed = [(self._random(), place) for place in range(len(items))]
        return [items[place] for _, place in sorted(keyed)]


def frozen_split(count: int, fraction: float, seed: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Split positions 0 to `count` - 1 into (train, validation), both ascending. Depends only on the arguments.

    Validation gets round(count * fraction) positions, at least 1 and at most count - 1; none if `fraction` is 0.
    Raises `InputError` for a fraction outside [0, 1), and for a positive fraction of fewer than 2 rows.
    """
    if not 0.0 <= fraction < 1.0:
        raise InputError(f"the validation fraction must be at least 0 and less than 1 ({fraction})")
    if fraction == 0.0:
        return tuple(range(count)), ()
    if count < 2:
        raise InputError(f"a validation split needs at least 2 rows, there are {count}; set data.validation_fraction=0")
    held = min(max(round(count * fraction), 1), count - 1)
    validation = {*Draw(f"andon validation split {seed}").shuffled(range(count))[:held]}
    return tuple(place for place in range(count) if place not in validation), tuple(sorted(validation))


def mixed(ids: Sequence[int], sizes: Sequence[int], weights: Sequence[float], seed: int) -> tuple[int, ...]:
    """The ids of an epoch, ascending: the rows `ids`, repeated by the weight of their file.

    sizes: the number of rows of each file; together the files have the row ids 0 to N - 1. Copy k of row r has the id
    r + k * N, so ids are unique. With all weights 1, the result is `ids`.

    n rows of weight w give m = n * w entries (w as its exact decimal value, m rounded half up): each row m // n times,
    and m % n rows, drawn by the seed and the file's position, once more. Raises `InputError` if a file's rows give no
    entry.
    """
    total, starts = sum(sizes), [0, *accumulate(sizes)]
    by_file: list[list[int]] = [[] for _ in sizes]
    for id_ in ids:
        by_file[bisect_right(starts, id_) - 1].append(id_)
    entries: list[int] = []
    for place, (rows, weight) in enumerate(zip(by_file, weights, strict=True)):
        wanted = math.floor(len(rows) * Fraction(repr(weight)) + Fraction(1, 2))
        if rows and not wanted:
            what = f"{weight:g} leaves none of the {len(rows)} rows of that file to train on"
            raise InputError.at(f"data.train.{place}.weight", what)
        copies, rest = divmod(wanted, max(len(rows), 1))
        entries += [row + copy * total for copy in range(copies) for row in rows]
        entries += [row + copies * total for row in Draw(f"andon mix {seed} {place}").shuffled(sorted(rows))[:rest]]
    return tuple(sorted(entries))


ClassWeights = Literal["uniform", "inverse", "sqrt_inverse"]

_FRACTION = re.compile(r"[-+]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][-+]?\d+)?")
_NUMBER = re.compile(r"[-+]?((\d+\.?\d*|\.\d+)([eE][-+]?\d+)?|inf|infinity|nan)", re.IGNORECASE | re.ASCII)
_AS_SETS = "; to learn several labels a row: --task multi-label"
_AS_NUMBERS = "; to learn the numbers themselves: --task regression"
LARGEST_TARGET = 3e38
"""The largest absolute target; the fp32 maximum is 3.4e38."""


def text_fault(text: str) -> str | None:
    """The reason `text` is unusable as a text or class name, or None."""
    if not text.strip():
        return "is empty" if not text else f"is only white space ({shown(text)})"
    if "\0" in text:
        return f"holds a NUL character ({shown(text)})"
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return f"holds a lone surrogate at character {error.start} ({shown(text[max(0, error.start - 10) :])})"
    return None


def column_fault(name: str, value: object) -> str | None:
    """The reason `value` in column `name` is unusable as a text, or None."""
    fault = text_fault(value) if isinstance(value, str) else must_be("a string", value)
    return f"{name} {fault}" if fault else None


def must_be(wanted: str, value: object) -> str:
    return f"must be {wanted}, is {'null' if value is None else shown(value)}"


def class_of(label: object, typed: bool) -> tuple[object, str | None]:
    """(label, its fault or None) for classification. typed: as in `Table`; untyped labels are strings."""
    fault = None
    negative = f"label {label} is negative; labels are integers from 0, or strings"
    if label is None:
        fault = "label is null"
    elif isinstance(label, str):
        fault = text_fault(label)
        if fault is not None:
            fault = f"label {fault}"
        elif not typed and _FRACTION.fullmatch(label):
            fault = f"label {label} is a number with a fraction; labels are integers from 0, or strings{_AS_NUMBERS}"
        elif not typed and re.fullmatch(r"-\d+", label):
            fault = negative
    elif isinstance(label, int) and not isinstance(label, bool):
        fault = None if label >= 0 else negative
    else:
        hint = _AS_NUMBERS if isinstance(label, float) else _AS_SETS if isinstance(label, list) else ""
        fault = f"label {shown(label)} is a {type(label).__name__}; labels are integers from 0, or strings{hint}"
    return label, fault


def target_of(label: object, typed: bool) -> tuple[float, str | None]:
    """(number, its fault or None) for regression. typed: as in `Table`; untyped labels are strings."""
    if label is None:
        return 0.0, "label is null"
    if isinstance(label, bool) or not isinstance(label, int | float if typed else str):
        return 0.0, f"label {shown(label)} is a {type(label).__name__}, and a number is learned"
    if isinstance(label, str) and not _NUMBER.fullmatch(label.strip()):
        return 0.0, f"label {shown(label)} is not a number"
    try:
        number = float(label)
    except OverflowError:  # JSON integers are unbounded
        number = math.inf
    if math.isnan(number):
        return 0.0, f"label {shown(label)} is not finite"
    if abs(number) > LARGEST_TARGET:
        return 0.0, f"label {shown(label)} is beyond {LARGEST_TARGET:g}, and a model gives numbers of fp32"
    return number, None


def label_set_of(separator: str | None, label: object, typed: bool) -> tuple[tuple[str, ...], str | None]:
    """(labels of a row, their fault or None) for multi-label classification.

    label: a list of strings, or a string of labels joined by `separator`; an empty string means no labels.
    """
    if isinstance(label, str) and separator is not None:
        label = [part.strip() for part in label.split(separator)] if label.strip() else []
    if isinstance(label, str):
        remedy = "--set data.label_separator=';'"
        return (), f"label {shown(label)} is one string; write a list, or say what is between labels: {remedy}"
    if not isinstance(label, list):
        return (), f"label {shown(label)} is a {type(label).__name__}, and a list of labels is learned"
    for name in label:
        fault = text_fault(name) if isinstance(name, str) else f"is a {type(name).__name__}, and labels are strings"
        if fault is not None:
            return (), f"label {shown(name)} {fault}"
    repeated = next((name for name in label if label.count(name) > 1), None)
    return tuple(label), None if repeated is None else f"label {shown(repeated)} is there twice"


def same_kind(labels: Sequence[int | str], typed: bool) -> tuple[Sequence[int | str], list[tuple[int, str]]]:
    """(labels as integers or strings, (position, fault) of each label whose type is not the majority's).

    Untyped labels become integers if all are integers without leading zeros.
    """
    # An untyped label of more than 18 digits is a name.
    number = re.compile(r"[0-9]{1,18}")
    integer = [isinstance(label, int) if typed else number.fullmatch(str(label)) is not None for label in labels]
    integers = sum(integer)
    if integers == len(labels) and not typed:
        plain = all(str(int(label)) == label for label in labels)
        return ([int(label) for label in labels] if plain else labels), []
    if integers in (0, len(labels)):
        return labels, []
    usual = 2 * integers >= len(labels)
    strings = len(labels) - integers
    others = f"{integers} others, which are integers" if usual else f"{strings} others, which are strings"
    return labels, [
        (place, f"label {shown(label)} is of another type than {others}")
        for place, (label, is_integer) in enumerate(zip(labels, integer, strict=True))
        if is_integer != usual
    ]


def alike(names: Sequence[str]) -> list[list[str]]:
    """Groups of names that differ only in case, white space or Unicode form, in the order of `names`."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(" ".join(unicodedata.normalize("NFKC", name).casefold().split()), []).append(name)
    return [group for group in groups.values() if len(group) > 1]


def class_weights(kind: ClassWeights, counts: Sequence[int], names: Sequence[str] = ()) -> tuple[float, ...]:
    """One weight per class, with sum K, from the `counts` of rows in each of K classes (F-TUNE-005 of the seed).

    uniform: all 1; inverse: proportional to n / (K * n_c); sqrt_inverse: to its square root. names: of the classes, for
    messages. Raises `InputError` without classes, and for a class without rows unless `kind` is uniform.
    """
    if not counts:
        raise InputError("class weights need at least one class")
    if kind == "uniform":
        return (1.0,) * len(counts)
    absent = [number for number, count in enumerate(counts) if count <= 0]
    if absent:
        shown_as = [shown(names[number]) if names else str(number) for number in absent]
        what = f"{kind} needs a training row of every class; no row has class"
        raise InputError([Problem("data.class_weights", f"{what} {name}") for name in shown_as])
    total = sum(counts)
    raw = [total / (len(counts) * count) for count in counts]
    if kind == "sqrt_inverse":
        raw = [math.sqrt(weight) for weight in raw]
    scale = len(counts) / math.fsum(raw)
    return tuple(weight * scale for weight in raw)
