"""Scores by hand and by definitions over all pairs of rows; confusion matrices and their files."""

from __future__ import annotations

import hashlib
import json
import math
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from andon.console.messages import InputError
from andon.metrics.scores import (
    MOST_BYTES,
    Confusion,
    auroc,
    confusion_of,
    digest_of,
    most_bytes,
    read_confusion,
    scores,
    write_confusion,
)

ROWS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=30)
SCORED = st.lists(st.tuples(st.sampled_from([0.0, 0.125, 0.5, 0.75, 1.0]), st.integers(0, 1)), max_size=25)


def matrix_of(table: list[list[int]]) -> Confusion:
    cells = ((i, j, rows) for i, line in enumerate(table) for j, rows in enumerate(line) if rows)
    return Confusion(len(table), tuple(cells))


def test_where_a_denominator_is_zero_the_score_is_zero() -> None:
    """All predictions have one class, or there are no rows."""
    assert scores(matrix_of([[2, 0, 0], [1, 0, 0], [0, 0, 0]])).mcc == 0.0
    nothing = scores(Confusion(2, ()), [], [], [])
    assert (nothing.rows, nothing.accuracy, nothing.mcc, nothing.auroc, nothing.loss) == (0, 0.0, 0.0, None, 0.0)


@given(count=st.lists(st.integers(1, 10**9), min_size=2, max_size=6))
def test_all_right_is_exactly_one(count: list[int]) -> None:
    found = scores(Confusion(len(count), tuple((k, k, rows) for k, rows in enumerate(count))))
    assert (found.accuracy, found.macro_f1, found.mcc) == (1.0, 1.0, 1.0)


@given(rows=ROWS)
def test_scores_follow_their_definitions(rows: list[tuple[int, int]]) -> None:
    predicted = torch.tensor([one for one, _ in rows])
    found = scores(confusion_of(predicted, torch.tensor([two for _, two in rows]), 4))
    assert found.accuracy == sum(one == two for one, two in rows) / len(rows)
    for label, one in enumerate(found.classes):
        said = [actual == label for guess, actual in rows if guess == label]
        there = [guess == label for guess, actual in rows if actual == label]
        precision = sum(said) / len(said) if said else 0.0
        recall = sum(there) / len(there) if there else 0.0
        f1 = 2 * precision * recall / (precision + recall) if precision + recall else 0.0
        assert (one.precision, one.recall, one.support) == (precision, recall, len(there))
        assert one.f1 == pytest.approx(f1, rel=1e-12)
    assert found.macro_f1 == pytest.approx(sum(one.f1 for one in found.classes) / len({*sum(rows, ())}), rel=1e-12)
    assert found.mcc == pytest.approx(pearson(rows), rel=1e-12, abs=1e-12)
    assert (found.rows, found.auroc, found.loss) == (len(rows), None, None)


def pearson(rows: list[tuple[int, int]]) -> float:
    def centred(column: list[int], label: int) -> list[float]:
        share = column.count(label) / len(column)
        return [(value == label) - share for value in column]

    guesses, actuals = [one for one, _ in rows], [two for _, two in rows]
    x = [value for label in range(4) for value in centred(guesses, label)]
    y = [value for label in range(4) for value in centred(actuals, label)]
    spread = sum(a * a for a in x) * sum(b * b for b in y)
    return sum(a * b for a, b in zip(x, y, strict=True)) / math.sqrt(spread) if spread > 1e-18 else 0.0


@given(rows=SCORED)
def test_auroc_is_the_share_of_pairs_in_order(rows: list[tuple[float, int]]) -> None:
    pairs = [(p, n) for p, one in rows for n, two in rows if one == 1 and two == 0]
    wanted = sum((p > n) + 0.5 * (p == n) for p, n in pairs) / len(pairs) if pairs else None
    assert auroc([score for score, _ in rows], [label for _, label in rows]) == wanted


@given(rows=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 1), st.floats(0, 1e6)), max_size=30), seed=st.integers())
def test_the_order_of_rows_changes_no_bit(rows: list[tuple[float, int, float]], seed: int) -> None:
    mixed = list(rows)
    random.Random(seed).shuffle(mixed)

    def of(some: list[tuple[float, int, float]]) -> object:
        guesses = torch.tensor([int(p > 0.5) for p, _, _ in some], dtype=torch.int64)
        actual = [label for _, label, _ in some]
        matrix = confusion_of(guesses, torch.tensor(actual, dtype=torch.int64), 2)
        return scores(matrix, [p for p, _, _ in some], actual, [loss for _, _, loss in some])

    assert of(mixed) == of(rows)


def test_scores_are_plain_values() -> None:
    found = scores(matrix_of([[1, 0], [1, 1]]), [0.1, 0.9, 0.6], [0, 1, 1], [0.5, 1.5, 4.0])
    assert found.loss == 2.0
    assert json.loads(json.dumps(found.as_dict()))["confusion"] == {
        "classes": 2,
        "cells": [[0, 0, 1], [1, 0, 1], [1, 1, 1]],
    }


def test_what_does_not_fit_is_refused() -> None:
    """Lists of other lengths would give the scores of other rows."""
    with pytest.raises(ValueError, match="shorter"):
        auroc([0.1, 0.2], [1])
    with pytest.raises(ValueError, match="not 0 or 1"):
        auroc([0.1], [2])
    with pytest.raises(ValueError, match="NaN"):
        auroc([math.nan], [1])


# Confusion matrices.

PAIRS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=40)
SMALL = Confusion(3, ((0, 0, 1), (0, 2, 1), (1, 1, 1)))


@given(pairs=PAIRS)
def test_every_cell_is_a_count(pairs: list[tuple[int, int]]) -> None:
    predicted, actual = (torch.tensor([pair[k] for pair in pairs], dtype=torch.int64) for k in (0, 1))
    found = confusion_of(predicted, actual, 4)
    assert found.table() == [[pairs.count((j, i)) for j in range(4)] for i in range(4)]
    assert sorted(found.cells) == list(found.cells)


def test_a_hundred_thousand_classes_take_no_more_than_their_rows(tmp_path: Path) -> None:
    """Ten thousand million cells would fit no memory and no file; 1,000 rows have at most 1,000 of them."""
    classes = 100_000
    actual = torch.arange(0, classes, 100)
    matrix = confusion_of((actual + 7) % classes, actual, classes)
    assert scores(matrix).rows == len(matrix.cells) == 1000
    write_confusion(tmp_path, matrix)
    (file,) = tmp_path.iterdir()
    assert file.stat().st_size <= most_bytes(classes, 1000) < 25_000
    assert read_confusion(tmp_path, digest_of(matrix)) == matrix


def test_the_file_has_the_name_that_its_bytes_have(tmp_path: Path) -> None:
    write_confusion(tmp_path / "confusion", SMALL)
    file = tmp_path / "confusion" / f"{digest_of(SMALL)}.json"
    assert file.read_text() == '{"cells":[[0,0,1],[0,2,1],[1,1,1]],"classes":3}\n'
    assert hashlib.sha256(file.read_bytes()).hexdigest()[:16] == digest_of(SMALL)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[", "Expecting"),
        ("[1]", "cells and classes"),
        ('{"cells":[],"classes":3,"more":1}', "nothing else"),
        ('{"cells":[],"classes":0}', "a number from 1"),
        ('{"cells":[],"classes":true}', "a number from 1"),
        ('{"cells":[[0,0]],"classes":3}', "three integers"),
        ('{"cells":[[0,0,true]],"classes":3}', "three integers"),
        ('{"cells":[[0,3,1]],"classes":3}', "no class below 3"),
        ('{"cells":[[0,-1,1]],"classes":3}', "no class below 3"),
        ('{"cells":[[0,0,0]],"classes":3}', "of no row"),
        ('{"cells":[[0,1,1],[0,0,1]],"classes":3}', "does not follow"),
        ('{"cells":[[0,0,1],[0,0,1]],"classes":3}', "does not follow"),
    ],
)
def test_a_file_of_another_form_is_refused(tmp_path: Path, text: str, why: str) -> None:
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    (tmp_path / f"{digest}.json").write_text(text)
    with pytest.raises(InputError, match=f"{digest}.json: is not the confusion matrix.*{why}"):
        read_confusion(tmp_path, digest)


def test_a_file_that_is_not_the_one_quoted_is_refused(tmp_path: Path) -> None:
    write_confusion(tmp_path, SMALL)
    digest = digest_of(SMALL)
    file = tmp_path / f"{digest}.json"
    file.write_text(file.read_text().replace("[1,1,1]", "[1,1,2]"))
    with pytest.raises(InputError, match=f"{digest}.json: is not the confusion matrix.*the ledger quotes {digest}"):
        read_confusion(tmp_path, digest)
    file.rename(tmp_path / "elsewhere")
    with pytest.raises(InputError, match=f"{digest}.json: cannot be read: No such file"):
        read_confusion(tmp_path, digest)
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="it is a link"):
        read_confusion(tmp_path, digest)
    file.unlink()
    with file.open("wb") as sparse:
        sparse.truncate(MOST_BYTES + 1)
    with pytest.raises(InputError, match="more than"):
        read_confusion(tmp_path, digest)
    for name in ("../../etc/passwd", 7, None, [[1, 2], [3, 4]]):
        with pytest.raises(InputError, match="quotes no confusion matrix"):
            read_confusion(tmp_path, name)


@given(pairs=PAIRS)
def test_no_file_is_longer_than_is_said_before(pairs: list[tuple[int, int]]) -> None:
    predicted, actual = (torch.tensor([pair[k] for pair in pairs], dtype=torch.int64) for k in (0, 1))
    matrix = confusion_of(predicted, actual, 4)
    text = str({"cells": [list(cell) for cell in matrix.cells], "classes": 4}).replace(" ", "")
    assert len(text) < most_bytes(4, len(pairs))
