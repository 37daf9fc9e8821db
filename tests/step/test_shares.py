"""Ranks that compute more micro-batches than others: who computes changes, the sum and its order do not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from andon.backend.inprocess import InlineBackend
from andon.step.audit import AuditSpec
from andon.step.optimizer import OptimizerSpec
from andon.step.plan import rank_leaves
from andon.step.step import TrainingStep
from tests.support.toy import CPU, Settings, ToyTask, rate, record, replica


def ran(settings: Settings, world: int, shares: tuple[int, ...] | None) -> list[dict[str, object]]:
    replicas = [replica(optimizer=settings.optimizer) for _ in range(world)]
    backend = InlineBackend([CPU] * world)
    audit = AuditSpec(1, None)
    step = TrainingStep(backend, replicas, ToyTask(), settings.micro_batches, settings.clip_norm, audit, shares=shares)
    step.attest_start({})
    return [dict(record(step(batch, rate(batch.step), batch.step), replicas)) for batch in settings.batches()]


@pytest.mark.parametrize("shares", [(7, 0), (1, 6), (0, 5, 2), (3, 3, 1), (0, 0, 7), (1, 4, 1, 1)])
@pytest.mark.parametrize(
    "settings",
    [Settings(7, clip_norm=0.05), Settings(7, optimizer=OptimizerSpec("sgd", momentum=0.9))],
    ids=["adamw", "sgd"],
)
def test_any_shares_give_the_bits_of_equal_ones(settings: Settings, shares: tuple[int, ...]) -> None:
    assert ran(settings, len(shares), shares) == ran(settings, 2, None)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=5).filter(any))
def test_shares_are_runs_end_to_end(shares: list[int]) -> None:
    count = sum(shares)
    runs = rank_leaves(count, len(shares), shares)
    assert [len(run) for run in runs] == shares
    assert [leaf for run in runs for leaf in run] == list(range(count))


@pytest.mark.parametrize("shares", [(4,), (4, 5), (9, -1), (8, 0, 0)])
def test_shares_that_do_not_fit_are_refused(shares: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="does not share out 8 micro-batches to 2 ranks"):
        rank_leaves(8, 2, shares)
