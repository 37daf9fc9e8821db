"""Spans of tags: what is one, by hand, in the schemes that are in use, and their scores by counting."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from andon.metrics.scores import UNREAD, scheme, span_scores, spans

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
    assert spans(tags.split(), scheme(tags.split())) == wanted


WAYS = {"B-PER": "{role}-{type}", "B_PER": "{role}_{type}", "B.PER": "{role}.{type}", "PER-B": "{type}-{role}"}
SCHEMES = {"IOB": "BIIB", "IOBES": "BIES", "BILOU": "BILU", "BMEWO": "BMEW"}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("letters", SCHEMES.values(), ids=SCHEMES)
def test_spans_are_the_same_however_a_set_of_tags_is_written(way: str, letters: str) -> None:
    first, inner, last, single = (WAYS[way].format(role=letter, type="PER") for letter in letters)
    tags = [first, inner, last, "O", single]
    parts = scheme({*tags, *(WAYS[way].format(role=letter, type="LOC") for letter in letters)})
    assert spans(tags, parts) == [("PER", 0, 2), ("PER", 4, 4)]
    # Its last word missed, the span is another one.
    assert spans([first, inner, "O", "O", single], parts) == [("PER", 0, 1), ("PER", 4, 4)]


@pytest.mark.parametrize("tag", ["U-PER", "S_PER", "B.PER", "W-PER"])
def test_a_set_of_single_words_alone_is_one_span_a_word(tag: str) -> None:
    assert spans([tag, tag, "O"], scheme([tag, "O"])) == [("PER", 0, 0), ("PER", 1, 1)]


def test_a_type_that_looks_like_a_role_is_a_type() -> None:
    tags = ["U-turn", "U-turn", "O", "I_think", "O", "vitamin-B"]
    assert spans(tags, scheme(tags)) == [("U-turn", 0, 1), ("I_think", 3, 3), ("vitamin-B", 5, 5)]


def test_a_word_that_was_not_read_is_missed() -> None:
    found = span_scores([["B-X", UNREAD, UNREAD]], [["B-X", "B-X", "O"]], ("B-X", "O"))
    assert (found.precision, found.recall, found.accuracy, found.words) == (1.0, 0.5, 1 / 3, 3)


@given(ROWS)
def test_scores_count_spans_that_are_in_both(rows: list[list[tuple[str, str]]]) -> None:
    predicted, actual = ([[pair[side] for pair in row] for row in rows] for side in (0, 1))
    names = {"O", *(f"{prefix}-{type_}" for prefix in "BIES" for type_ in ("X", "Y"))}
    found, parts = span_scores(predicted, actual, names), scheme(names)
    mine = {(place, span) for place, row in enumerate(predicted) for span in spans(row, parts)}
    there = {(place, span) for place, row in enumerate(actual) for span in spans(row, parts)}
    assert found.f1 == (2 * len(mine & there) / (len(mine) + len(there)) if mine or there else 0)
    assert found.precision == (len(mine & there) / len(mine) if mine else 0)
    assert found.recall == (len(mine & there) / len(there) if there else 0)
    assert found.words == sum(len(row) for row in actual)
    assert sum(one.support for one in found.types.values()) == len(there)
    assert found.accuracy * max(found.words, 1) == pytest.approx(sum(a == b for row in rows for a, b in row))


def test_a_span_of_which_one_end_is_wrong_is_wrong() -> None:
    names = ("B-X", "I-X", "B-Y", "O")
    found = span_scores([["B-X", "I-X", "O", "B-Y", "O", "O"]], [["B-X", "I-X", "I-X", "B-Y", "O", "O"]], names)
    assert (found.precision, found.recall, found.f1, found.accuracy) == (0.5, 0.5, 0.5, 5 / 6)
    assert (found.types["X"].f1, found.types["Y"].f1) == (0.0, 1.0)
