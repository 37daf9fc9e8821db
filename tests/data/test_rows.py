"""Rows and data sets: what a digest sees, and what a subset keeps."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from andon.data.rows import DataSet, Row, repeated_texts, shared_texts

TEXTS = st.lists(st.tuples(st.text(max_size=6), st.integers(0, 2)), max_size=6)
LABELS = ("no", "yes", "maybe")


def made(pairs: list[tuple[str, int]], labels: tuple[str, ...] = LABELS) -> DataSet:
    return DataSet(tuple(Row(place, *pair) for place, pair in enumerate(pairs)), labels, "test")


def test_the_digest_is_sha256_over_length_and_bytes_of_each_text_and_label_name() -> None:
    content = b""
    for part in ("é", "yes", "", "no"):
        content += len(part.encode()).to_bytes(8, "little") + part.encode()
    assert made([("é", 1), ("", 0)]).digest == hashlib.sha256(content).hexdigest()


@given(TEXTS, TEXTS)
def test_two_data_sets_share_a_digest_only_when_all_rows_are_the_same(
    one: list[tuple[str, int]], other: list[tuple[str, int]]
) -> None:
    one, other = ([(t.encode("utf-8", "replace").decode(), n) for t, n in each] for each in (one, other))
    assert (made(one).digest == made(other).digest) == (one == other)


def test_the_digest_follows_label_names_and_not_their_numbers() -> None:
    swapped = DataSet((Row(0, "a", 1),), ("yes", "no"), "elsewhere")
    assert swapped.digest == made([("a", 0)]).digest != made([("a", 1)]).digest


def test_a_subset_keeps_ids_and_order_and_can_be_taken_again() -> None:
    data = made([("a", 0), ("b", 1), ("c", 2), ("d", 0)])
    some = data.subset([3, 1])
    assert [(row.id, row.text) for row in some.rows] == [(3, "d"), (1, "b")]
    assert some.subset([1]).rows == (data.rows[1],)
    assert some.labels == data.labels
    with pytest.raises(KeyError):
        some.subset([0])


def test_repeated_and_shared_texts_are_counted() -> None:
    train, other = made([("a", 0), ("b", 1), ("a", 0), ("a", 1)]), made([("a", 0), ("c", 1), ("a", 0)])
    assert repeated_texts(train) == 2
    assert shared_texts(train, other) == 2
    assert shared_texts(other, train) == 3
