"""Scores of spans of tagged words, from integer counts: as CoNLL's script and seqeval, by its default, count them.

A tag is O, or a prefix (B begins, I goes on, E ends, S is alone) and a type: `B-PER`; without one it is as with I.
A span is the longest run of words that go on: a word goes on with the span before it where its prefix is I or E, the
word before has B or I, and both have one type. So a span may also begin with I or E, as in IOB1 or where a model errs.
Spans are the same where both ends and the type are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from andon.metrics.scores import ClassScores, class_scores

Span = tuple[str, int, int]
"""Type, first word, last word."""
_PREFIXES = ("B", "I", "E", "S")


@dataclass(frozen=True)
class SpanScores:
    """Scores of spans over `rows` rows.

    f1, precision, recall: of all spans together; 0.0 where a denominator is zero. types: of each type by name; support
    is its number of spans. accuracy: words with the right tag, of `words`. loss: mean over words.
    """

    rows: int
    words: int
    f1: float
    precision: float
    recall: float
    accuracy: float
    types: dict[str, ClassScores]
    loss: float | None

    @property
    def confusion(self) -> tuple[tuple[int, ...], ...]:
        """None: what counts are spans."""
        return ()

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def spans(tags: Sequence[str]) -> list[Span]:
    """The spans of one row's tags, in order."""
    found: list[Span] = []
    before, kind = "O", ""
    for place, tag in enumerate(tags):
        prefix, type_ = _parts(tag)
        if prefix != "O" and prefix in "IE" and before in ("B", "I") and type_ == kind:
            found[-1] = (type_, found[-1][1], place)
        elif prefix != "O":
            found.append((type_, place, place))
        before, kind = prefix, type_
    return found


def _parts(tag: str) -> tuple[str, str]:
    if tag == "O":
        return "O", ""
    prefix, dash, type_ = tag.partition("-")
    return (prefix, type_) if dash and prefix in _PREFIXES else (tag, "") if tag in _PREFIXES else ("I", tag)


def span_scores(
    predicted: Sequence[Sequence[str]], actual: Sequence[Sequence[str]], loss: float | None = None
) -> SpanScores:
    """Scores of rows of tags, one a word. Raises `ValueError` for rows of different lengths."""
    right: Counter[str] = Counter()
    guessed: Counter[str] = Counter()
    wanted: Counter[str] = Counter()
    same = words = 0
    for guess, truth in zip(predicted, actual, strict=True):
        same += sum(one == other for one, other in zip(guess, truth, strict=True))
        words += len(truth)
        found, there = set(spans(guess)), set(spans(truth))
        for counts, each in ((right, found & there), (guessed, found), (wanted, there)):
            counts.update(type_ for type_, _, _ in each)
    whole = class_scores(right.total(), guessed.total(), wanted.total())
    types = {type_: class_scores(right[type_], guessed[type_], wanted[type_]) for type_ in sorted({*guessed, *wanted})}
    accuracy = same / max(words, 1)
    return SpanScores(len(actual), words, whole.f1, whole.precision, whole.recall, accuracy, types, loss)
