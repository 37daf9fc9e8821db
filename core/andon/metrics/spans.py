"""Scores of spans of tagged words, from integer counts, equal to those of CoNLL's script and of seqeval's default.

A tag is O, or a prefix (B begins, I or M continues, E or L ends, S, U or W is alone) and a type: `B-PER`; a tag without
prefix counts as I. `scheme` infers how a set of tags is written: `B-PER`, `B_PER`, `B.PER`, `PER-B`; IOB, IOBES, BILOU,
BMEWO. A word continues the span before it if its prefix is I or E, the word before has B or I, and the types are equal.
So a span may also begin with I or E, as in IOB1 or by a model's error. Two spans match if both ends and the type do.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from andon.metrics.scores import ClassScores, Scores, class_scores

Span = tuple[str, int, int]
"""Type, first word, last word."""
UNREAD = ""
"""The predicted tag of a word that the model did not read."""
_ROLES = {"B": "B", "I": "I", "M": "I", "E": "E", "L": "E", "S": "S", "U": "S", "W": "S"}
_BEFORE = re.compile(r"([BIMELSUW])([-_.:/|])(.+)", re.DOTALL)
_BEHIND = re.compile(r"(.+)([-_.:/|])([BIMELSUW])", re.DOTALL)
Parts = Callable[[str], tuple[str, str]]
"""A tag as its role (B, I, E, S, or O for none) and its type."""


@dataclass(frozen=True)
class SpanScores(Scores):
    """Scores of spans over `rows` rows.

    f1, precision, recall: of all spans together; 0.0 if a denominator is zero. types: the scores of each type by name;
    support is its number of spans. accuracy: share of `words` with the right tag. loss: mean over words.
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
    """How to parse the tags `names`, which are all tags of the data.

    B, I, E and S with a hyphen are always prefixes. Other letters, other separators and a role after the type count
    only if the set shows them: one type with both B and a role that continues or ends, or no tag without a role.
    """
    shown: set[tuple[re.Pattern[str], str]] = set()
    for pattern in (_BEFORE, _BEHIND):
        matches = [match for name in names if (match := pattern.fullmatch(name)) is not None]
        roles: dict[tuple[str, str], set[str]] = {}
        for match in matches:
            role, type_ = (match[1], match[3]) if pattern is _BEFORE else (match[3], match[1])
            roles.setdefault((match[2], type_), set()).add(_ROLES[role])
        shown |= {(pattern, mark) for (mark, _), held in roles.items() if "B" in held and held & {"I", "E"}}
        marks = {match[2] for match in matches}
        if pattern is _BEFORE and len(marks) == 1 and len(matches) == len({*names} - {"O"}):
            shown |= {(pattern, mark) for mark in marks}

    def parts(tag: str) -> tuple[str, str]:
        if tag in ("O", UNREAD):
            return "O", ""
        before, behind = _BEFORE.fullmatch(tag), _BEHIND.fullmatch(tag)
        if before is not None and (_BEFORE, before[2]) in shown:
            return _ROLES[before[1]], before[3]
        if before is not None and before[2] == "-" and before[1] in "BIES":
            return before[1], before[3]
        if behind is not None and (_BEHIND, behind[2]) in shown:
            return _ROLES[behind[3]], behind[1]
        return (tag, "") if tag in _ROLES.values() else ("I", tag)

    return parts


def spans(tags: Sequence[str], parts: Parts) -> list[Span]:
    """The spans of one row's tags, in order."""
    found: list[Span] = []
    before, kind = "O", ""
    for place, tag in enumerate(tags):
        prefix, type_ = parts(tag)
        if prefix != "O" and prefix in "IE" and before in ("B", "I") and type_ == kind:
            found[-1] = (type_, found[-1][1], place)
        elif prefix != "O":
            found.append((type_, place, place))
        before, kind = prefix, type_
    return found


def span_scores(
    predicted: Sequence[Sequence[str]],
    actual: Sequence[Sequence[str]],
    names: Collection[str],
    loss: float | None = None,
) -> SpanScores:
    """Scores of rows of tags, one a word; a predicted `UNREAD` is always wrong.

    names: all tags of the data, for `scheme`. Raises `ValueError` for rows of different lengths.
    """
    parts = scheme(names)
    right: Counter[str] = Counter()
    guessed: Counter[str] = Counter()
    wanted: Counter[str] = Counter()
    same = words = 0
    for guess, truth in zip(predicted, actual, strict=True):
        same += sum(one == other for one, other in zip(guess, truth, strict=True))
        words += len(truth)
        found, there = set(spans(guess, parts)), set(spans(truth, parts))
        for counts, each in ((right, found & there), (guessed, found), (wanted, there)):
            counts.update(type_ for type_, _, _ in each)
    whole = class_scores(right.total(), guessed.total(), wanted.total())
    types = {type_: class_scores(right[type_], guessed[type_], wanted[type_]) for type_ in sorted({*guessed, *wanted})}
    accuracy = same / max(words, 1)
    return SpanScores(len(actual), words, whole.f1, whole.precision, whole.recall, accuracy, types, loss)
