"""The audit draws what the ranks drew: dropout and batch statistics hide no wrong gradient, and fake none."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import andon
from tests.watch.clean_models import Normed
from tests.watch.loop import CLASSES, FEATURES, data
from tests.watch.small import answers

STEPS = 3


class FunctionalDropout(nn.Module):
    """No module says that numbers are drawn, as in attention."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, 16), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(nn.functional.dropout(torch.tanh(self.first(x)), 0.4, self.training))


def normalised() -> nn.Module:
    """Batch statistics and nothing random."""
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, CLASSES))


Loss = Callable[[nn.Module, Sequence[int]], tuple[Tensor, int]]


def summed(model: nn.Module, ids: Sequence[int]) -> tuple[Tensor, int]:
    x, y = data()
    index = torch.tensor(list(ids))
    return nn.functional.cross_entropy(model(x[index]), y[index], reduction="sum"), len(ids)


def balanced(model: nn.Module, ids: Sequence[int]) -> tuple[Tensor, int]:
    """Divided by a number that depends on all rows: no sum over rows."""
    loss, count = summed(model, ids)
    return loss * (1 + len(set(data()[1][torch.tensor(list(ids))].tolist()))), count


def _train(model: Callable[[], nn.Module], reference: Loss, factor: float) -> tuple[list[str], int]:
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    wrapped = DistributedDataParallel(model())
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    torch.manual_seed(100 + rank)
    said: list[str] = []
    w = andon.watch(wrapped, optimizer, reference=reference, every=2, action=lambda found: said.append(str(found)))
    x, y = data()
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        ids = torch.arange(9 + step % 2) + 7 * step
        for number, part in enumerate(ids[rank::world].tensor_split(2)):
            wrapped.require_backward_grad_sync = number == 1
            w.batch(part)
            loss = nn.functional.cross_entropy(wrapped(x[part]), y[part], reduction="sum")
            (factor * world * loss / len(ids)).backward()
        optimizer.step()
    w.close()
    return said, w.evaluations.get("gradient-law", 0)


@pytest.mark.parametrize("model", [FunctionalDropout, normalised, Normed])
def test_a_right_gradient_of_random_passes_is_the_law(model: Callable[[], nn.Module]) -> None:
    """Updates 1 and 3 are audited, with the ranks' own masks and batch statistics, and nothing is found."""
    assert answers(2, _train, model, summed, 1.0) == [([], 2)] * 2


def test_a_wrong_gradient_of_random_passes_is_named_by_its_factor() -> None:
    for said, _ in answers(2, _train, FunctionalDropout, summed, 2.0):
        assert "gradient-law broken at step 1" in said[0]
        assert "2.000 x the law = world size 2" in said[0]


def test_a_loss_that_is_no_sum_over_rows_is_not_judged_by_parts() -> None:
    """With dropout on the law can only be taken part by part; where that is another law, nothing is said."""
    assert answers(2, _train, FunctionalDropout, balanced, 1.0) == [([], 0)] * 2
