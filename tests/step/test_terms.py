"""A loss may be a sum of more terms than rows: the gradient is divided by their count, and a rank counts as planned."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import nn

from andon.backend.base import InlineBackend
from andon.step.micro_batch import Batch, LeafLoss
from andon.step.plan import GlobalBatch
from andon.step.replica import Replica
from andon.step.step import TrainingStep
from andon_contracts.violation import Violation
from tests.support.toy import CPU, ROWS, Settings, ToyTask, build, rate

WORLD = 3
BATCH = GlobalBatch(1, 0, 0, tuple(range(0, ROWS, 2)))


class RaggedTask(ToyTask):
    """Row i counts i % 4 times, some of them not at all: a sum of as many terms, of which one says there are more."""

    def __init__(self, more: int = 0) -> None:
        super().__init__()
        self.more = more

    def planned_terms(self, ids: Sequence[int]) -> Sequence[int]:
        return [row % 4 for row in ids]

    def loss_sum(self, model: nn.Module, batch: Batch) -> LeafLoss:
        logits, times = model(batch["x"]), batch["id"] % 4
        losses = nn.functional.cross_entropy(logits, batch["y"], reduction="none")
        right = (logits.argmax(-1) == batch["y"]) * times
        return LeafLoss((losses * times).sum(), right.sum(), times.sum() + self.more)


def _step(task: ToyTask, world: int) -> tuple[TrainingStep, list[Replica]]:
    step, replicas = build(InlineBackend([CPU] * world), Settings(8), task)
    for replica in replicas:
        replica.model.get_submodule("dropout").p = 0.0  # type: ignore[assignment]
    step.attest_start({})
    return step, replicas


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_the_mean_is_over_terms_and_not_over_rows(world: int) -> None:
    step, replicas = _step(RaggedTask(), world)
    model = copy.deepcopy(replicas[0].model).double()
    result = step(BATCH, 0.0, 1)
    repeated = torch.tensor([row for row in BATCH.ids for _ in range(row % 4)])
    task = ToyTask()
    logits = model(task.x[repeated].double())
    loss = nn.functional.cross_entropy(logits, task.y[repeated])
    loss.backward()  # type: ignore[no-untyped-call]
    right = int((logits.argmax(1) == task.y[repeated]).sum())
    assert (result.terms, result.rows, result.correct) == (len(repeated), len(BATCH.ids), right)
    assert result.loss == pytest.approx(loss.item(), rel=1e-6)
    for name, gradient in replicas[-1].reduced_gradient().items():
        wanted = model.get_parameter(name).grad
        assert wanted is not None
        assert (gradient - wanted).norm() <= 2e-6 * wanted.norm()


def test_the_bits_are_the_same_on_any_number_of_ranks() -> None:
    results = [_step(RaggedTask(), world)[0](BATCH, rate(1), 1) for world in (1, 2, 3, 4)]
    assert len({(each.loss.hex(), each.grad_norm.hex(), tuple(each.digests.items())) for each in results}) == 1


@pytest.mark.parametrize("more", [-1, 1])
def test_a_rank_that_counts_otherwise_is_stopped_before_the_update(more: int) -> None:
    with pytest.raises(Violation, match=r"content-planned .* sums \d+ terms, but its rows have \d+"):
        _step(RaggedTask(more), WORLD)[0](BATCH, rate(1), 1)
