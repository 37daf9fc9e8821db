"""Span scores of tagged words from integer counts, equal to the CoNLL script's and to seqeval's default mode.

A tag is O, or a prefix and a type: `B-PER`. B begins a span, I or M continues it, E or L ends it, and S, U or W is a
span of one word. A tag without prefix counts as I. `scheme` infers how tags are written: `B-PER`, `B_PER`, `B.PER`,
`PER-B`; IOB, IOBES, BILOU, BMEWO. A word extends the previous span if its prefix is I or E, the previous word's is B or
I, and the types are equal; so I or E may also begin a span, as in IOB1. Spans match if both ends and the type match.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from andon.metrics.scores import ClassScores, Scores, class_scores

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
    accuracy = same / max(words, 1)
    return SpanScores(len(actual), words, whole.f1, whole.precision, whole.recall, accuracy, types, loss)
