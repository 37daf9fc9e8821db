"""Counts are exact, and adding those of any parts gives those of the whole."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from andon.metrics.scores import confusion_matrix, merge

PAIRS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=40)


def counted(pairs: list[tuple[int, int]]) -> torch.Tensor:
    """The matrix of (predicted, actual) pairs of four classes."""
    predicted = torch.tensor([one for one, _ in pairs], dtype=torch.int64)
    return confusion_matrix(predicted, torch.tensor([two for _, two in pairs], dtype=torch.int64), 4)


def test_rows_are_actual_and_columns_predicted() -> None:
    """Two rows of class 0, one of them taken for 2; one row of class 1, right."""
    found = confusion_matrix(torch.tensor([0, 2, 1]), torch.tensor([0, 0, 1]), 3)
    assert found.tolist() == [[1, 0, 1], [0, 1, 0], [0, 0, 0]]
    assert found.dtype == torch.int64


@given(pairs=PAIRS)
def test_every_cell_is_a_count(pairs: list[tuple[int, int]]) -> None:
    """Against counting the pairs one by one."""
    assert counted(pairs).tolist() == [[pairs.count((j, i)) for j in range(4)] for i in range(4)]


@given(parts=st.lists(PAIRS, min_size=1, max_size=6))
def test_parts_add_up_to_the_whole(parts: list[list[tuple[int, int]]]) -> None:
    """Workers without rows included, in any order."""
    whole = counted([pair for part in parts for pair in part])
    assert torch.equal(merge(counted(part) for part in parts), whole)
    assert torch.equal(merge(counted(part) for part in reversed(parts)), whole)


def test_merging_does_not_change_what_it_is_given() -> None:
    """The first matrix is not the sum's memory."""
    first = counted([(0, 0)])
    merge([first, first])
    assert int(first.sum()) == 1


def test_what_cannot_be_counted_is_refused() -> None:
    """A class that does not exist would land in another cell."""
    with pytest.raises(ValueError, match="predicted classes 0 to 3"):
        confusion_matrix(torch.tensor([0, 3]), torch.tensor([0, 1]), 3)
    with pytest.raises(ValueError, match="actual classes -1 to 1"):
        confusion_matrix(torch.tensor([0, 2]), torch.tensor([-1, 1]), 3)
    with pytest.raises(ValueError, match="one length"):
        confusion_matrix(torch.tensor([0, 2]), torch.tensor([1]), 3)
    with pytest.raises(ValueError, match="no confusion matrix"):
        merge([])
    with pytest.raises(ValueError, match="different classes"):
        merge([torch.zeros(2, 2), torch.zeros(3, 3)])
