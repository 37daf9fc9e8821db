"""A number of each text: its loss, its gradient, its scores, by what can be written down without it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from andon.console.problems import InputError
from andon.tasks.regression import RegressionTask
from tests.model.tiny import CPU, PAD
from tests.tasks.apart import Logits, farthest, ragged, tiny

ROWS = 40
TARGETS = [20 + math.sin(3 * row) for row in range(ROWS)]
"""Of one sign: where gradients of rows cancel, what is left of them has fewer digits."""
TOKENS = ragged(ROWS)
TASK = RegressionTask(TOKENS, TARGETS, vocab_size=33, pad_id=PAD)


def squared(logits: Logits, row: int) -> torch.Tensor:
    return (logits(TOKENS[row])[0] - TARGETS[row]) ** 2


def test_the_gradient_is_that_of_a_loop_in_float64() -> None:
    assert farthest(tiny("regression", "value"), TASK, ROWS, squared, [1] * ROWS) <= 2e-6


class Constant(nn.Module):
    """Gives every row one number."""

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Constant:
        self.logits = torch.full((len(input_ids), 1), 1.5)
        return self


def test_the_loss_is_a_sum_of_squares() -> None:
    """Of 1.5 against 1, 2 and -0.5 that is 0.25 + 0.25 + 4; a mean would be a third of it. No number is right."""
    rows = RegressionTask([[1], [2, 3], [4]], [1.0, 2.0, -0.5], vocab_size=33, pad_id=PAD)
    loss = rows.loss_sum(Constant(), rows.load([0, 1, 2], CPU))
    assert loss.loss_sum.item() == 4.5
    assert loss.correct.item() == 0
    assert rows.score([0, 2], torch.tensor([[1.5], [1.5]], dtype=torch.float64)).loss == (0.25 + 4) / 2


def test_content_sees_the_last_bit_of_a_target() -> None:
    one, other = (
        RegressionTask([[1]], [target], vocab_size=33, pad_id=PAD) for target in (0.1, math.nextafter(0.1, 1))
    )
    assert torch.equal(one.content(one.load([0], CPU)), one.planned_content([0]))
    assert not torch.equal(one.planned_content([0]), other.planned_content([0]))


@pytest.mark.parametrize("target", [math.nan, math.inf, -1e300])
def test_a_target_that_no_model_can_give_is_refused_with_its_place(target: float) -> None:
    with pytest.raises(InputError, match=r"rows\.csv:3: target"):
        RegressionTask([[1], [2]], [0.0, target], vocab_size=33, pad_id=PAD, places=["rows.csv:2", "rows.csv:3"])
