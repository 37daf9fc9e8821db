"""Embedded data sets of short reviews, made from a seed and nothing else: what a review is worth, or what it is about.

A review is one clause or two, each about one thing: `the staff was very kind`. It is worth the mean of its clauses,
each the worth of its opinion, strengthened, weakened or turned round by the word before it, so that counting words is
not enough.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from andon.data.draw import Draw
from andon.data.rows import VALUE, LabelSets, Row, Targets

TRAIN_ROWS = 2225
EVAL_ROWS = 500
"""Rows that are never trained on."""

_THINGS = {
    "food": ("food", "soup", "dinner", "bread"),
    "room": ("room", "bed", "view", "window"),
    "staff": ("staff", "waiter", "manager", "porter"),
    "price": ("price", "bill", "rate", "deal"),
}
_OPINIONS = {"superb": 1.0, "good": 0.6, "nice": 0.4, "plain": -0.2, "poor": -0.6, "awful": -1.0}
_DEGREES = {"": 1.0, "very ": 1.25, "rather ": 0.5, "never ": -0.75}
_JOINS = (", ", " and ", " but ")


def _clause(draw: Draw) -> tuple[str, str, float]:
    """What it says, of which topic, and what it is worth."""
    topic = draw.pick([*_THINGS])
    degree, opinion = draw.pick([*_DEGREES]), draw.pick([*_OPINIONS])
    return f"the {draw.pick(_THINGS[topic])} was {degree}{opinion}", topic, _DEGREES[degree] * _OPINIONS[opinion]


def _review(draw: Draw) -> tuple[str, list[tuple[str, float]]]:
    """A review, and the topic and the worth of each clause."""
    clauses = [_clause(draw) for _ in range(1 + draw.below(2))]
    text = clauses[0][0] + "".join(draw.pick(_JOINS) + clause[0] for clause in clauses[1:])
    return text, [clause[1:] for clause in clauses]


def numbers(seed: int, count: int) -> Targets:
    """`count` reviews with texts that all differ and what each is worth, between -1.25 and 1.25.

    The same `seed` gives the same rows on any machine and any version of Python.
    """
    draw = Draw(f"andon reviews {seed}")
    found: dict[str, float] = {}
    while len(found) < count:
        text, clauses = _review(draw)
        found.setdefault(text, round(sum(worth for _, worth in clauses) / len(clauses), 3))
    rows = tuple(Row(place, text, worth) for place, (text, worth) in enumerate(found.items()))
    return Targets(rows, VALUE, f"embedded reviews, seed {seed}")


def label_sets(seed: int, count: int) -> LabelSets:
    """`count` reviews with texts that all differ, each with what it is about: one topic or two."""
    draw = Draw(f"andon topics of reviews {seed}")
    found: dict[str, tuple[int, ...]] = {}
    topics = tuple(sorted(_THINGS))
    while len(found) < count:
        text, clauses = _review(draw)
        found.setdefault(text, tuple(sorted({topics.index(topic) for topic, _ in clauses})))
    rows = tuple(Row(place, text, labels) for place, (text, labels) in enumerate(found.items()))
    return LabelSets(rows, topics, f"embedded topics of reviews, seed {seed}")


def embedded_label_sets(seed: int) -> tuple[LabelSets, LabelSets]:
    """As `embedded_numbers`."""
    return _held_out(label_sets(seed, TRAIN_ROWS + EVAL_ROWS))


def embedded_numbers(seed: int) -> tuple[Targets, Targets]:
    """The data of a run that names none: rows to train on and rows never trained on, with no text in both."""
    return _held_out(numbers(seed, TRAIN_ROWS + EVAL_ROWS))


_Rows = TypeVar("_Rows", Targets, LabelSets)


def _held_out(everything: _Rows) -> tuple[_Rows, _Rows]:
    apart = tuple(replace(row, id=place) for place, row in enumerate(everything.rows[TRAIN_ROWS:]))
    trained_on = replace(everything, rows=everything.rows[:TRAIN_ROWS])
    return trained_on, replace(everything, rows=apart, source=f"{everything.source}, held out")
