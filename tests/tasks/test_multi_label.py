"""Several labels of a text: their loss, its terms, the gradient and the scores, by what can be written down apart."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from andon.console.problems import InputError
from andon.metrics.label_sets import multi_label_scores
from andon.tasks.multi_label import MultiLabelTask
from tests.model.tiny import CPU, PAD
from tests.tasks.apart import Logits, farthest, ragged, tiny

ROWS, LABELS = 40, 3
WANTED = [
    tuple(label for label in range(LABELS) if (row * row + 3 * row * label) % (label + 3) == 0) for row in range(ROWS)
]
TOKENS = ragged(ROWS)
TASK = MultiLabelTask(TOKENS, WANTED, num_labels=LABELS, vocab_size=33, pad_id=PAD)
TABLES = st.integers(1, 6).flatmap(
    lambda labels: st.lists(st.tuples(*[st.lists(st.booleans(), min_size=labels, max_size=labels)] * 2), min_size=1)
)


def entropy(logits: Logits, row: int) -> torch.Tensor:
    found = logits(TOKENS[row])
    return sum(  # type: ignore[return-value]
        torch.log1p((-found[label] if label in WANTED[row] else found[label]).exp()) for label in range(LABELS)
    )


def test_the_gradient_is_that_of_a_loop_in_float64() -> None:
    assert farthest(tiny("multi-label", "a", "b", "c"), TASK, ROWS, entropy, [LABELS] * ROWS) <= 2e-6


def test_a_row_has_a_term_for_each_label() -> None:
    batch = TASK.load([0, 1, 2], CPU)
    assert [tuple(row.nonzero().flatten().tolist()) for row in batch["labels"]] == WANTED[:3]
    assert TASK.planned_terms([0, 1]) == (LABELS, LABELS)
    assert torch.equal(TASK.content(batch), TASK.planned_content([0, 1, 2]))
    scores = TASK.score([0, 1], torch.zeros(2, LABELS, dtype=torch.float64))
    assert scores.loss == pytest.approx(math.log(2), rel=1e-6)
    for label in range(LABELS):
        changed = {**batch, "labels": batch["labels"].clone()}
        changed["labels"][1, label] ^= 1
        assert (TASK.content(changed) == TASK.planned_content([0, 1, 2])).tolist() == [True, False, True]


def test_a_label_that_is_none_is_refused_with_its_place() -> None:
    with pytest.raises(InputError, match="row 1: label 3 is not one of the 3 labels 0 to 2"):
        MultiLabelTask([[1], [2]], [(0,), (3,)], num_labels=3, vocab_size=33, pad_id=PAD)


@given(TABLES)
def test_scores_are_their_definitions(rows: list[tuple[list[bool], list[bool]]]) -> None:
    predicted, actual = ([pair[side] for pair in rows] for side in (0, 1))
    found = multi_label_scores(torch.tensor(predicted), torch.tensor(actual), [0.5] * len(rows))

    def f1(pairs: list[tuple[bool, bool]]) -> float:
        yes = sum(guess + truth for guess, truth in pairs)
        return 2 * sum(guess and truth for guess, truth in pairs) / yes if yes else 0.0

    columns = [
        [*zip(guess, truth, strict=True)]
        for guess, truth in zip(zip(*predicted, strict=True), zip(*actual, strict=True), strict=True)
    ]
    assert found.micro_f1 == f1([pair for column in columns for pair in column])
    assert found.macro_f1 == pytest.approx(sum(map(f1, columns)) / len(columns))
    assert found.subset_accuracy == sum(guess == truth for guess, truth in rows) / len(rows)
    assert [one.support for one in found.classes] == [sum(column) for column in zip(*actual, strict=True)]
    assert (found.rows, found.loss) == (len(rows), 0.5)
