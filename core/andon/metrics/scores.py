"""Classification, multi-label and regression scores: identical floats for any number of ranks and any row order.

Counts are integers, and every sum of floats is rounded once (`math.fsum`). A score with denominator zero is 0.0
(scikit-learn's zero_division=0): precision of a class that is never predicted, recall of a class without rows, F1 of a
class with neither, MCC if all rows or all predictions have one class, accuracy without rows. AUROC is None unless both
classes have rows. A correlation is None if all predictions or all targets are equal.

A confusion matrix is written to `confusion/DIGEST.json` in a run folder, and the ledger records DIGEST. K classes have
K * K cells, too many for a ledger line or a summary if K is in the thousands. At most one cell per evaluated row is
nonzero, and the file lists only the nonzero cells, ascending, without spaces, with a final line feed:
`{"cells":[[actual,predicted,rows],...],"classes":K}`. DIGEST is the first 16 hexadecimal digits of its SHA-256.

Span scores of tagged words equal the CoNLL script's and to seqeval's default mode.

A tag is O, or a prefix and a type: `B-PER`. B begins a span, I or M continues it, E or L ends it, and S, U or W is a
span of one word. A tag without prefix counts as I. `scheme` infers how tags are written: `B-PER`, `B_PER`, `B.PER`,
`PER-B`; IOB, IOBES, BILOU, BMEWO. A word extends the previous span if its prefix is I or E, the previous word's is B or
I, and the types are equal; so I or E may also begin a span, as in IOB1. Spans match if both ends and the type match.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from andon.console.messages import InputError
from andon.run.atomic import storage, write_whole
from andon_contracts.fields import Hex16, read_field
from andon_contracts.untrusted import MOST_JSON, read_regular

if TYPE_CHECKING:
    import torch

MOST_BYTES = MOST_JSON
"""Size limit in bytes for reading a file."""
_MOST_CLASSES = 1 << 20


@dataclass(frozen=True)
class Confusion:
    """How many rows of each class were predicted as each class.

    classes: the number of classes. cells: the nonzero cells (actual, predicted, rows), ascending.
    """

    classes: int
    cells: tuple[tuple[int, int, int], ...]

    def table(self) -> list[list[int]]:
        """The dense matrix, [actual][predicted]. It has classes * classes entries, so use it for few classes only."""
        table = [[0] * self.classes for _ in range(self.classes)]
        for actual, predicted, rows in self.cells:
            table[actual][predicted] = rows
        return table


def confusion_of(predicted: torch.Tensor, actual: torch.Tensor, num_labels: int) -> Confusion:
    """Count a confusion matrix. predicted, actual: int64 [rows] class ids.

    Memory and time are linear in the rows, independent of the number of classes.
    """
    counted = Counter(zip(actual.tolist(), predicted.tolist(), strict=True))
    return Confusion(num_labels, tuple((*cell, rows) for cell, rows in sorted(counted.items())))


def digest_of(confusion: Confusion) -> str:
    """The DIGEST in the name of the matrix's file: 16 hexadecimal digits."""
    return _digest(_encoded(confusion))


def write_confusion(folder: Path, confusion: Confusion) -> None:
    """Write the file of `confusion` into `folder` atomically. Raises `InputError` if the disk fails."""
    data = _encoded(confusion)
    with storage(folder):
        folder.mkdir(exist_ok=True)
    write_whole(folder / f"{_digest(data)}.json", data)


def read_confusion(folder: Path, digest: object) -> Confusion:
    """Load the matrix whose `digest` is in a ledger or a summary.

    Raises `InputError` naming the file if it is missing, larger than `MOST_BYTES`, malformed or has another digest.
    """
    try:
        path = folder / f"{read_field(Hex16, digest, 'confusion')}.json"
    except ValueError as error:
        raise InputError.at(folder.parent, f"quotes no confusion matrix: {error}") from error
    try:
        data = read_regular(path, MOST_BYTES)
        if _digest(data) != digest:
            raise ValueError(f"its bytes have the digest {_digest(data)}, the ledger quotes {digest}")
        return _decoded(data)
    except OSError as error:
        raise InputError.at(path, f"cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        what = f"is not the confusion matrix that was written: {error}; put the file back as it was"
        raise InputError.at(path, what) from error


def most_bytes(classes: int, rows: int) -> int:
    """Upper bound of the file size in bytes for `classes` classes and `rows` evaluated rows."""
    return min(classes * classes, rows) * (2 * len(str(classes)) + len(str(rows)) + len("[,,],")) + 100


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _encoded(confusion: Confusion) -> bytes:
    body = {"cells": confusion.cells, "classes": confusion.classes}
    return (json.dumps(body, separators=(",", ":")) + "\n").encode("ascii")


def _decoded(data: bytes) -> Confusion:
    body = json.loads(data)
    if not isinstance(body, dict) or body.keys() != {"cells", "classes"} or not isinstance(body["cells"], list):
        raise ValueError("it must hold cells and classes, and nothing else")
    classes, before, cells = body["classes"], (-1, -1), []
    if type(classes) is not int or not 1 <= classes <= _MOST_CLASSES:
        raise ValueError(f"classes must be a number from 1 to {_MOST_CLASSES}")
    for place, cell in enumerate(body["cells"]):
        if not isinstance(cell, list) or len(cell) != 3 or not all(type(number) is int for number in cell):
            raise ValueError(f"cells[{place}] must be three integers: actual class, predicted class, rows")
        actual, predicted, rows = cell
        if not (0 <= actual < classes and 0 <= predicted < classes and 1 <= rows < 1 << 63):
            raise ValueError(f"cells[{place}] is of no class below {classes}, or of no row")
        if (actual, predicted) <= before:
            raise ValueError(f"cells[{place}] does not follow the cell before it")
        before = actual, predicted
        cells.append((actual, predicted, rows))
    return Confusion(classes, tuple(cells))


class Scores:
    """Base of every task's evaluation scores over `rows` rows.

    loss: mean over the loss terms; None if unknown. confusion: None except in single-label classification.
    """

    rows: int
    loss: float | None
    confusion: Confusion | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        values: dict[str, Any] = asdict(self)  # type: ignore[call-overload]
        return values


@dataclass(frozen=True)
class SourcedScores(Scores):
    """Scores over all rows (`whole`) and per data source (`sources`)."""

    whole: Scores
    sources: Mapping[str, Scores]

    def __post_init__(self) -> None:
        for name in ("rows", "loss", "confusion"):
            object.__setattr__(self, name, getattr(self.whole, name))

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON: all scores of `whole`, and the scalar scores of each source."""
        numbers = {
            name: {key: value for key, value in each.as_dict().items() if isinstance(value, int | float)}
            for name, each in self.sources.items()
        }
        return self.whole.as_dict() | {"sources": numbers}


@dataclass(frozen=True)
class ClassScores:
    """Scores of one class, in [0, 1]. support: its number of rows."""

    precision: float
    recall: float
    f1: float
    support: int


def class_scores(right: int, predicted: int, actual: int) -> ClassScores:
    """Scores of one class from its true positives (`right`), predictions and actual rows."""
    return ClassScores(
        _ratio(right, predicted), _ratio(right, actual), _ratio(2 * right, predicted + actual), support=actual
    )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


@dataclass(frozen=True)
class ClassificationScores(Scores):
    """Scores of single-label classification over `rows` rows.

    macro_f1: mean of F1 over the classes that have rows or predictions, as in scikit-learn. mcc: multi-class Matthews
    correlation (Gorodkin 2004), in [-1, 1]. auroc: for class 1 of two classes, else None. loss: mean over rows.
    """

    rows: int
    accuracy: float
    macro_f1: float
    mcc: float
    classes: tuple[ClassScores, ...]
    confusion: Confusion
    auroc: float | None = None
    loss: float | None = None


def scores(
    confusion: Confusion,
    positive_scores: Sequence[float] | None = None,
    labels: Sequence[int] = (),
    row_losses: Sequence[float] | None = None,
) -> ClassificationScores:
    """Scores of a confusion matrix.

    positive_scores, labels: the score of class 1 (any monotone score) and the label 0 or 1 per row, in the same order,
    for AUROC with two classes. row_losses: one per row, for the mean loss.
    """
    actual, predicted, right = ([0] * confusion.classes for _ in range(3))
    for true, guess, count in confusion.cells:
        actual[true] += count
        predicted[guess] += count
        right[true] += count if true == guess else 0
    rows, hits = sum(actual), sum(right)
    classes = tuple(map(class_scores, right, predicted, actual))
    covariance = hits * rows - sum(a * p for a, p in zip(actual, predicted, strict=True))
    spreads = [rows * rows - sum(count * count for count in counts) for counts in (actual, predicted)]
    return ClassificationScores(
        rows=rows,
        accuracy=_ratio(hits, rows),
        macro_f1=_ratio(math.fsum(each.f1 for each in classes), sum(map(bool, map(max, actual, predicted)))),
        # Squared as integers, so the quotient is rounded once and the root stays in [-1, 1].
        mcc=math.copysign(math.sqrt(_ratio(covariance * covariance, spreads[0] * spreads[1])), covariance),
        classes=classes,
        confusion=confusion,
        auroc=None if positive_scores is None else auroc(positive_scores, labels),
        loss=None if row_losses is None else _ratio(math.fsum(row_losses), rows),
    )


def auroc(positive_scores: Sequence[float], labels: Sequence[int]) -> float | None:
    """Area under the ROC curve: the probability that a row of class 1 scores above a row of class 0, ties counting half
    (Mann and Whitney 1947). Pairs are counted as integers. None unless both classes have rows.

    Raises `ValueError` for lists of different lengths, labels other than 0 and 1, and NaN.
    """
    if any(label not in (0, 1) for label in labels) or any(map(math.isnan, positive_scores)):
        raise ValueError("a label is not 0 or 1, or a score is NaN")
    pairs = list(zip(positive_scores, labels, strict=True))
    positive = [score for score, label in pairs if label == 1]
    negative = sorted(score for score, label in pairs if label == 0)
    if not positive or not negative:
        return None
    doubled = sum(bisect_left(negative, score) + bisect_right(negative, score) for score in positive)
    return doubled / (2 * len(positive) * len(negative))


@dataclass(frozen=True)
class MultiLabelScores(Scores):
    """Scores of multi-label classification over `rows` rows.

    subset_accuracy: share of rows whose labels are all right. micro_f1: from the counts of all labels together.
    macro_f1: unweighted mean over labels, including labels without rows. loss: mean over rows and labels.
    """

    rows: int
    subset_accuracy: float
    micro_f1: float
    macro_f1: float
    classes: tuple[ClassScores, ...]
    loss: float | None


def multi_label_scores(predicted: torch.Tensor, actual: torch.Tensor, losses: Sequence[float]) -> MultiLabelScores:
    """Scores of predicted and actual bool [rows, labels]. losses: one per row and label, in any order."""
    right, guessed, wanted = (
        [int(count) for count in table.sum(dim=0)] for table in (predicted & actual, predicted, actual)
    )
    classes = tuple(map(class_scores, right, guessed, wanted))
    return MultiLabelScores(
        rows=len(predicted),
        subset_accuracy=int((predicted == actual).all(dim=1).sum()) / max(len(predicted), 1),
        micro_f1=class_scores(sum(right), sum(guessed), sum(wanted)).f1,
        macro_f1=math.fsum(each.f1 for each in classes) / max(len(classes), 1),
        classes=classes,
        loss=math.fsum(losses) / max(len(losses), 1),
    )


@dataclass(frozen=True)
class RegressionScores(Scores):
    """Scores of regression over `rows` rows.

    mae, rmse: mean absolute error and root mean squared error, in the unit of the targets. pearson: linear correlation,
    spearman: rank correlation with mean ranks for ties; both in [-1, 1]. loss: mean squared error.
    """

    rows: int
    mae: float
    rmse: float
    pearson: float | None
    spearman: float | None
    loss: float | None


def regression_scores(predicted: Sequence[float], actual: Sequence[float]) -> RegressionScores:
    """Scores of one prediction and one target per row. Without rows the errors are 0.0.

    Raises `ValueError` for lists of different lengths and for numbers that are not finite.
    """
    if not all(map(math.isfinite, (*predicted, *actual))):
        raise ValueError("a prediction or a target is not finite")
    errors = [guess - target for guess, target in zip(predicted, actual, strict=True)]
    count = max(len(errors), 1)
    squared = math.fsum(error * error for error in errors) / count
    mae, rmse = math.fsum(map(abs, errors)) / count, math.sqrt(squared)
    return RegressionScores(len(errors), mae, rmse, pearson(predicted, actual), spearman(predicted, actual), squared)


def pearson(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Pearson correlation of two lists of equal length, in [-1, 1]; None if a list is constant."""
    deviations = []
    for values in (first, second):
        low, high = min(values, default=0.0), max(values, default=0.0)
        if low == high:
            return None
        scaled = [(value - low) / (high - low) for value in values]  # so squares cannot underflow
        mean = math.fsum(scaled) / len(scaled)
        deviations.append([value - mean for value in scaled])
    x, y = deviations
    covariance = math.fsum(a * b for a, b in zip(x, y, strict=True))
    spread = math.sqrt(math.fsum(a * a for a in x)) * math.sqrt(math.fsum(b * b for b in y))
    return max(-1.0, min(1.0, covariance / spread))


def spearman(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Spearman correlation of two lists of equal length, from integer ranks; None if a list is constant."""
    # Doubled mean ranks are integers, and their mean is the number of values + 1.
    x, y = ([rank - len(values) - 1 for rank in _doubled_ranks(values)] for values in (first, second))
    covariance = sum(a * b for a, b in zip(x, y, strict=True))
    spread = sum(a * a for a in x) * sum(b * b for b in y)
    # Squared as integers, so the quotient is rounded once and the root stays in [-1, 1].
    return math.copysign(math.sqrt(covariance * covariance / spread), covariance) if spread else None


def _doubled_ranks(values: Sequence[float]) -> list[int]:
    ranks, before = [0] * len(values), 0
    for _, group in groupby(sorted(range(len(values)), key=values.__getitem__), key=values.__getitem__):
        places = [*group]
        for place in places:
            ranks[place] = 2 * before + len(places) + 1
        before += len(places)
    return ranks


Span = tuple[str, int, int]
"""(type, first word, last word), the last word included."""
UNREAD = ""
"""The predicted tag of a word that the model did not read."""
_ROLES = {"B": "B", "I": "I", "M": "I", "E": "E", "L": "E", "S": "S", "U": "S", "W": "S"}
_PREFIXED = re.compile(r"([BIMELSUW])([-_.:/|])(.+)", re.DOTALL)
_SUFFIXED = re.compile(r"(.+)([-_.:/|])([BIMELSUW])", re.DOTALL)
Parts = Callable[[str], tuple[str, str]]
"""Parses a tag into its role (B, I, E, S or O) and its type."""


@dataclass(frozen=True)
class SpanScores(Scores):
    """Scores of spans over `rows` rows.

    f1, precision, recall: over all spans; 0.0 if a denominator is zero. types: scores by span type, with the number of
    actual spans as support. accuracy: share of `words` with the right tag. loss: mean over words.
    """

    rows: int
    words: int
    f1: float
    precision: float
    recall: float
    accuracy: float
    types: dict[str, ClassScores]
    loss: float | None


def scheme(names: Collection[str]) -> Parts:
    """Returns the parser for tags of a data set. names: all its tags.

    B, I, E and S with a hyphen are always prefixes. Other letters, separators and suffixes (`PER-B`) are parsed only if
    the tags prove them: a type has both B and I or E, or every tag except O has a prefix with the same separator.
    """
    proven: set[tuple[re.Pattern[str], str]] = set()
    for pattern in (_PREFIXED, _SUFFIXED):
        matches = [match for name in names if (match := pattern.fullmatch(name)) is not None]
        roles: dict[tuple[str, str], set[str]] = {}
        for match in matches:
            role, type_ = (match[1], match[3]) if pattern is _PREFIXED else (match[3], match[1])
            roles.setdefault((match[2], type_), set()).add(_ROLES[role])
        proven |= {(pattern, mark) for (mark, _), of_type in roles.items() if "B" in of_type and of_type & {"I", "E"}}
        marks = {match[2] for match in matches}
        if pattern is _PREFIXED and len(marks) == 1 and len(matches) == len({*names} - {"O"}):
            proven |= {(pattern, mark) for mark in marks}

    def parts(tag: str) -> tuple[str, str]:
        if tag in ("O", UNREAD):
            return "O", ""
        prefixed, suffixed = _PREFIXED.fullmatch(tag), _SUFFIXED.fullmatch(tag)
        if prefixed is not None and (_PREFIXED, prefixed[2]) in proven:
            return _ROLES[prefixed[1]], prefixed[3]
        if prefixed is not None and prefixed[2] == "-" and prefixed[1] in "BIES":
            return prefixed[1], prefixed[3]
        if suffixed is not None and (_SUFFIXED, suffixed[2]) in proven:
            return _ROLES[suffixed[3]], suffixed[1]
        return (tag, "") if tag in _ROLES.values() else ("I", tag)

    return parts


def spans(tags: Sequence[str], parts: Parts) -> list[Span]:
    """The spans of one row's tags, in order."""
    result: list[Span] = []
    before, kind = "O", ""
    for place, tag in enumerate(tags):
        prefix, type_ = parts(tag)
        if prefix != "O" and prefix in "IE" and before in ("B", "I") and type_ == kind:
            result[-1] = (type_, result[-1][1], place)
        elif prefix != "O":
            result.append((type_, place, place))
        before, kind = prefix, type_
    return result


def span_scores(
    predicted: Sequence[Sequence[str]],
    actual: Sequence[Sequence[str]],
    names: Collection[str],
    loss: float | None = None,
) -> SpanScores:
    """Score rows of tags, one tag per word. A predicted `UNREAD` is always wrong.

    names: all tags of the data, for `scheme`. Raises `ValueError` for rows of different lengths.
    """
    parts = scheme(names)
    right: Counter[str] = Counter()
    guessed: Counter[str] = Counter()
    wanted: Counter[str] = Counter()
    same = words = 0
    for guess, truth in zip(predicted, actual, strict=True):
        same += sum(tag == actual_tag for tag, actual_tag in zip(guess, truth, strict=True))
        words += len(truth)
        guesses, truths = set(spans(guess, parts)), set(spans(truth, parts))
        for counts, each in ((right, guesses & truths), (guessed, guesses), (wanted, truths)):
            counts.update(type_ for type_, _, _ in each)
    whole = class_scores(right.total(), guessed.total(), wanted.total())
    types = {type_: class_scores(right[type_], guessed[type_], wanted[type_]) for type_ in sorted({*guessed, *wanted})}
    return SpanScores(len(actual), words, whole.f1, whole.precision, whole.recall, same / max(words, 1), types, loss)
