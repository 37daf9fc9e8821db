"""Spans of tags: what is one, by hand, in the schemes that are in use, and their scores by counting."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from andon.metrics.spans import span_scores, spans

TAGS = st.sampled_from(["O", *(f"{prefix}-{type_}" for prefix in "BIES" for type_ in ("X", "Y"))])
ROWS = st.lists(st.lists(st.tuples(TAGS, TAGS), max_size=8), max_size=5)


@pytest.mark.parametrize(
    ("tags", "wanted"),
    [
        ("B-X I-X O B-Y", [("X", 0, 1), ("Y", 3, 3)]),
        ("B-X B-X", [("X", 0, 0), ("X", 1, 1)]),
        ("I-X I-X O I-Y", [("X", 0, 1), ("Y", 3, 3)]),
        ("B-X I-Y", [("X", 0, 0), ("Y", 1, 1)]),
        ("B-X I-X E-X S-Y", [("X", 0, 2), ("Y", 3, 3)]),
        ("S-X I-X", [("X", 0, 0), ("X", 1, 1)]),
        ("E-X I-X E-X", [("X", 0, 0), ("X", 1, 2)]),
        ("B-X O I-X", [("X", 0, 0), ("X", 2, 2)]),
        ("X X O Y", [("X", 0, 1), ("Y", 3, 3)]),
        ("B-a-b I-a-b", [("a-b", 0, 1)]),
        ("O O", []),
    ],
)
def test_spans_are_these(tags: str, wanted: list[tuple[str, int, int]]) -> None:
    """IOB2, IOBES, and what begins without a beginning."""
    assert spans(tags.split()) == wanted


@given(ROWS)
def test_scores_count_spans_that_are_in_both(rows: list[list[tuple[str, str]]]) -> None:
    """Spans of each row apart, and each word once; what nobody predicted or has is 0."""
    predicted, actual = ([[pair[side] for pair in row] for row in rows] for side in (0, 1))
    found = span_scores(predicted, actual)
    mine = {(place, span) for place, row in enumerate(predicted) for span in spans(row)}
    there = {(place, span) for place, row in enumerate(actual) for span in spans(row)}
    assert found.f1 == (2 * len(mine & there) / (len(mine) + len(there)) if mine or there else 0)
    assert found.precision == (len(mine & there) / len(mine) if mine else 0)
    assert found.recall == (len(mine & there) / len(there) if there else 0)
    assert found.words == sum(len(row) for row in actual)
    assert sum(one.support for one in found.types.values()) == len(there)
    assert found.accuracy * max(found.words, 1) == pytest.approx(sum(a == b for row in rows for a, b in row))


def test_a_span_of_which_one_end_is_wrong_is_wrong() -> None:
    """One of two predicted is right, one of two there is found, although five of six words are."""
    found = span_scores([["B-X", "I-X", "O", "B-Y", "O", "O"]], [["B-X", "I-X", "I-X", "B-Y", "O", "O"]])
    assert (found.precision, found.recall, found.f1, found.accuracy) == (0.5, 0.5, 0.5, 5 / 6)
    assert (found.types["X"].f1, found.types["Y"].f1) == (0.0, 1.0)
