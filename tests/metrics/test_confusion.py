"""Confusion matrices: counts against counting by hand, and files that are read strictly."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from andon.console.problems import InputError
from andon.metrics.confusion import (
    MOST_BYTES,
    Confusion,
    confusion_of,
    digest_of,
    most_bytes,
    read_confusion,
    write_confusion,
)
from andon.metrics.scores import scores

PAIRS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=40)
SMALL = Confusion(3, ((0, 0, 1), (0, 2, 1), (1, 1, 1)))


@given(pairs=PAIRS)
def test_every_cell_is_a_count(pairs: list[tuple[int, int]]) -> None:
    predicted, actual = (torch.tensor([pair[k] for pair in pairs], dtype=torch.int64) for k in (0, 1))
    found = confusion_of(predicted, actual, 4)
    assert found.table() == [[pairs.count((j, i)) for j in range(4)] for i in range(4)]
    assert sorted(found.cells) == list(found.cells)


def test_what_cannot_be_counted_is_refused() -> None:
    """A class that does not exist would land in another cell."""
    with pytest.raises(ValueError, match="predicted classes 0 to 3"):
        confusion_of(torch.tensor([0, 3]), torch.tensor([0, 1]), 3)
    with pytest.raises(ValueError, match="actual classes -1 to 1"):
        confusion_of(torch.tensor([0, 2]), torch.tensor([-1, 1]), 3)
    with pytest.raises(ValueError, match="one length"):
        confusion_of(torch.tensor([0, 2]), torch.tensor([1]), 3)


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
