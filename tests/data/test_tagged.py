"""Rows of words with a tag each: what is read, what is refused, and where a word's first token is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from andon.console.problems import InputError
from andon.data.tagged import embedded, read_tagged
from andon.data.tokens import byte_tokenizer


def written(folder: Path, *rows: object) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def test_words_and_tags_are_read(tmp_path: Path) -> None:
    row = {"tokens": ["Ann", "slept"], "tags": ["B-PER", "O"]}
    data = read_tagged(written(tmp_path, row))
    assert (data.labels, [(each.text, each.label) for each in data.rows]) == (("B-PER", "O"), [("Ann slept", (0, 1))])
    assert data.told(0) == ("B-PER, O", "Ann slept")
    other = read_tagged(written(tmp_path, row | {"tags": ["O", "B-PER"]}))
    assert other.digest != data.digest


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ({"tokens": ["a", "b"], "tags": ["O"]}, "2 tokens and 1 tags; each word has one tag"),
        ({"tokens": [], "tags": []}, "tokens is an empty list"),
        ({"tokens": "a b", "tags": ["O", "O"]}, "tokens must be a list of strings, is 'a b'"),
        ({"tokens": ["a", 3], "tags": ["O", "O"]}, "tokens: 3 is a int, and no string"),
        ({"tokens": ["a b"], "tags": ["O"]}, "tokens: 'a b' is not one word"),
        ({"tokens": ["a"], "tags": [1]}, "tags: 1 is a int, and no string"),
        ({"tokens": ["a"], "tags": ["B-PRE"]}, "tag 'B-PRE' is unknown; did you mean 'B-PER'?"),
        ({"tokens": ["a"]}, "has no column 'tags'; there are 'tokens'"),
    ],
)
def test_what_cannot_be_learned_is_told_with_its_line(tmp_path: Path, row: dict[str, object], fault: str) -> None:
    path = written(tmp_path, {"tokens": ["x"], "tags": ["O"]}, row)
    with pytest.raises(InputError) as caught:
        read_tagged(path, labels=("B-PER", "O"))
    assert str(caught.value).startswith(f"{path}:2: {fault}")


def test_a_word_is_where_its_first_byte_is() -> None:
    rows, firsts = byte_tokenizer().encode_words(["a\u00e9 bc d", "x"], 6)
    assert [len(row) for row in rows] == [6, 1]
    assert firsts == [[0, 4, -1], [0]]


def test_the_embedded_rows_are_the_same_for_a_seed() -> None:
    (train, held_out), again = embedded(3), embedded(3)
    assert (train.digest, held_out.digest) == tuple(each.digest for each in again)
    assert not {*train.texts()} & {*held_out.texts()}
    assert {tag for row in held_out.rows for tag in row.label} == {*range(len(train.labels))}
