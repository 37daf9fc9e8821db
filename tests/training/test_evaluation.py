"""Evaluation: every row once and finite, or a violation that says so; the same scores on any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from andon.backend.inprocess import InlineBackend
from andon.tasks import classification
from andon.tasks.classification import ClassificationTask
from andon.training.evaluation import evaluate
from andon_contracts.policy import evaluations, reset_evaluations
from andon_contracts.violation import Violation

ROWS = 150
"""Three batches of at most 64 rows, so that two ranks have different numbers of rows."""
CPU = torch.device("cpu")


class ByFirstToken(nn.Module):
    """Predicts class 1 for an odd first token, surely; `odd` is the logit it gives to class 1 of token `at`."""

    def __init__(self, at: int = -1, odd: float = 0.0) -> None:
        super().__init__()
        self._at, self._odd = at, odd

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> SimpleNamespace:
        first = input_ids[:, 0]
        logits = nn.functional.one_hot(first % 2, 2).float()
        logits[first == self._at, 1] = self._odd
        return SimpleNamespace(logits=logits)


class RepeatingBackend(InlineBackend):
    def gather(self, local: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [local[0] for _ in local]


class SwappingBackend(InlineBackend):
    def gather(self, local: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return list(local)[::-1]


def rows() -> ClassificationTask:
    """Row r is the token r and as many others as its number has over a multiple of 7; of class 1 if r is odd, but for
    row 5. So rows are not computed in their order."""
    labels = [row % 2 for row in range(ROWS)]
    labels[5] = 0
    return ClassificationTask(
        [[row] + [0] * (row % 7) for row in range(ROWS)],
        labels,
        num_labels=2,
        vocab_size=ROWS,
        pad_id=ROWS,
        max_length=8,
    )


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_row_is_scored_once(world: int) -> None:
    """One of 150 rows is wrong, a 0 taken for a 1, on any number of ranks, also where one has no batch."""
    found = evaluate(InlineBackend([CPU] * world), [ByFirstToken()] * world, rows(), range(ROWS))
    assert found.confusion is not None
    assert found.confusion.table() == [[75, 1], [0, 74]]
    assert found == evaluate(InlineBackend([CPU]), [ByFirstToken()], rows(), range(ROWS))


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_are_not_scored(odd: float) -> None:
    with pytest.raises(Violation, match="no finite logits: 1 of 150 rows have none, row 133 first") as found:
        evaluate(InlineBackend([CPU] * 2), [ByFirstToken(133, odd)] * 2, rows(), range(ROWS))
    assert found.value.clause == "finite"


def test_rows_that_come_back_twice_are_not_scored() -> None:
    with pytest.raises(Violation, match=r"rows \[6, 13, 20, 27, 34, 41, 48, 55\] were counted more than once") as found:
        evaluate(RepeatingBackend([CPU] * 2), [ByFirstToken()] * 2, rows(), range(ROWS))
    assert found.value.clause == "evaluation-once"


def test_rows_that_come_back_in_another_order_are_not_scored() -> None:
    with pytest.raises(Violation, match=r"evaluation-once .* not the planned ones in their order"):
        evaluate(SwappingBackend([CPU] * 2), [ByFirstToken()] * 2, rows(), range(ROWS))


def test_a_score_of_fewer_rows_than_planned_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = classification.scores
    monkeypatch.setattr(classification, "scores", lambda *given: replace(inner(*given), rows=ROWS - 1))
    with pytest.raises(Violation, match=r"evaluation-once .* rows is told as 149.0 on rank 0, the rows give 150.0"):
        evaluate(InlineBackend([CPU]), [ByFirstToken()], rows(), range(ROWS))


def test_each_evaluation_is_held_to_the_rows_that_a_watch_is_held_to() -> None:
    reset_evaluations()
    evaluate(InlineBackend([CPU]), [ByFirstToken()], rows(), range(ROWS))
    assert evaluations() == {"evaluation-once": 2, "finite": 1}
