"""Pairs of texts: read, joined by the tokenizer, digested and learned from as two texts and not as one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from andon.console.messages import InputError
from andon.data.readers import read
from andon.data.rows import DataSet, Targets
from andon.data.tokens import byte_tokenizer
from andon.model.masks import predictions
from andon.tasks.text import ClassificationTask
from tests.model.tiny import CPU, PAD, adapted, perturbed

ROWS = [("is it red", "it is red", "yes"), ("is it red", "it is blue", "no"), ("it is", " rediit is red", "no")]


def written(path: Path, rows: list[tuple[str, str, str]]) -> Path:
    path.write_text("".join(json.dumps({"question": a, "text": b, "label": c}) + "\n" for a, b, c in rows))
    return path


def test_both_texts_are_read_and_digested(tmp_path: Path) -> None:
    path = written(tmp_path / "rows.jsonl", ROWS)
    data = read(DataSet, path, text_column="question", text_pair_column="text")
    assert [(row.text, row.pair) for row in data.rows] == [(a, b) for a, b, _ in ROWS]
    moved = [(a + b[:1], b[1:], c) for a, b, c in ROWS]
    assert read(DataSet, written(path, moved), text_column="question", text_pair_column="text").digest != data.digest
    numbers = [(a, b, "1.5") for a, b, _ in ROWS]
    table = tmp_path / "rows.csv"
    table.write_text("question,text,label\n" + "".join(",".join(row) + "\n" for row in numbers))
    assert read(Targets, table, text_column="question", text_pair_column="text").rows[1].texts == numbers[1][:2]


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ({"question": "a", "label": "x"}, "has no column 'text'"),
        ({"question": "a", "text": " ", "label": "x"}, "text is only white space"),
        ({"question": "a", "text": 3, "label": "x"}, "text must be a string, is 3"),
    ],
)
def test_a_second_text_that_is_none_is_told_with_its_line(tmp_path: Path, row: dict[str, object], fault: str) -> None:
    path = written(tmp_path / "rows.jsonl", ROWS)
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
    with pytest.raises(InputError) as caught:
        read(DataSet, path, text_column="question", text_pair_column="text")
    assert str(caught.value).startswith(f"{path}:{len(ROWS) + 1}: {fault}")
    with pytest.raises(InputError, match=r"text_pair_column: 'question' is named for something else too"):
        read(DataSet, path, text_column="question", text_pair_column="question")


def test_a_pair_is_joined_as_the_tokenizer_joins_it_and_cut_at_the_longer_text() -> None:
    tokenizer = byte_tokenizer(pairs=True)
    pair = tokenizer.encode(["ab"], 100, ["</s>c"])
    first, second = tokenizer.encode(["ab", "</s>c"], 100).tokens
    assert pair.tokens == [[*first, 2, *second]]
    assert pair.columns == {}
    (cut,) = tokenizer.encode(["a" * 3], 11, ["b" * 30]).tokens
    assert (len(cut), cut.count(2)) == (11, 1)
    assert tokenizer.truncated == 1
    with pytest.raises(InputError, match=r"model\.max_length: must be more than 2 for pairs"):
        tokenizer.encode(["a"], 2, ["b"])


def test_an_encoder_is_told_which_text_a_token_is_of() -> None:
    rows, types = [[1, 2, 3, 4], [1, 2]], [[0, 0, 1, 1], [0, 1]]
    given, without = (
        ClassificationTask(rows, [0, 1], num_labels=3, vocab_size=33, pad_id=PAD, columns=columns)
        for columns in ({"token_type_ids": (types, 0)}, {})
    )
    batch = given.load([1, 0], CPU)
    assert batch["token_type_ids"][:, :5].tolist() == [[0, 1, 0, 0, 0], [0, 0, 1, 1, 0]]
    assert torch.equal(given.content(batch), given.planned_content([1, 0]))
    changed = {**batch, "token_type_ids": 1 - batch["token_type_ids"]}
    assert not (given.content(changed) == given.planned_content([1, 0])).any()
    encoder, decoder = perturbed(adapted("encoder")), perturbed(adapted("decoder"))
    plain = without.load([1, 0], CPU)
    assert not torch.allclose(predictions(encoder, batch), predictions(encoder, plain), atol=1e-3)
    assert torch.equal(predictions(decoder, batch), predictions(decoder, plain))
