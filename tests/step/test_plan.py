"""Which rows an update trains on, which rank computes them, and at which learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import chain, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from andon.config.schema import Config, Optimizer
from andon.config.schema import Schedule as Settings
from andon.step.plan import BatchPlan, GlobalBatch, Schedule, balanced_bounds, efficiency, epoch_order, rank_leaves

IDS = tuple(range(100, 137))
plans = st.builds(
    BatchPlan,
    ids=st.integers(1, 60).map(lambda count: tuple(range(7, 7 + count))),
    batch_size=st.integers(1, 70),
    micro_batches=st.integers(1, 9),
    seed=st.integers(0, 5),
    epochs=st.integers(1, 4),
)


@given(plans)
def test_every_row_once_an_epoch(plan: BatchPlan) -> None:
    for epoch in range(plan.epochs):
        first = epoch * plan.steps_per_epoch + 1
        batches = [plan.batch(step) for step in range(first, first + plan.steps_per_epoch)]
        assert sorted(row for batch in batches for row in batch.ids) == sorted(plan.ids)
        assert all(len(batch.ids) == plan.batch_size for batch in batches[:-1])
        assert [batch.position for batch in batches] == [i * plan.batch_size for i in range(len(batches))]
        assert {batch.epoch for batch in batches} == {epoch} == {plan.epoch_of(batch.step) for batch in batches}
        assert [plan.is_epoch_end(batch.step) for batch in batches] == [False] * (len(batches) - 1) + [True]


@given(plans)
def test_micro_batches_are_the_batch_end_to_end(plan: BatchPlan) -> None:
    for step in range(1, plan.total_steps + 1):
        batch = plan.batch(step)
        parts = batch.micro_batches(plan.micro_batches)
        assert tuple(chain(*parts)) == batch.ids
        assert len(parts) == plan.micro_batches
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(plans, st.integers(1, 6))
def test_ranks_without_a_row_are_those_that_no_batch_gives_any(plan: BatchPlan, world: int) -> None:
    busy = {
        rank
        for step in range(1, plan.steps_per_epoch + 1)
        for rank, leaves in enumerate(rank_leaves(plan.micro_batches, world))
        if any(plan.batch(step).micro_batches(plan.micro_batches)[leaf] for leaf in leaves)
    }
    assert plan.idle_ranks(world) == world - len(busy)


def test_steps_are_counted_by_hand() -> None:
    plan = BatchPlan(IDS, 10, 8, seed=3, epochs=3)
    assert (plan.steps_per_epoch, plan.total_steps) == (4, 12)
    assert [len(plan.batch(step).ids) for step in (1, 2, 3, 4)] == [10, 10, 10, 7]
    short = BatchPlan(IDS, 10, 8, seed=3, epochs=3, max_steps=6)
    assert short.total_steps == 6
    assert [short.is_epoch_end(step) for step in range(1, 7)] == [False, False, False, True, False, True]


def test_order_depends_on_seed_and_epoch_only() -> None:
    orders = {BatchPlan(IDS, 37, 8, seed, 3).batch(epoch + 1).ids for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9
    assert IDS not in orders
    again = BatchPlan(tuple(IDS), 37, 2, 1, 3).batch(2).ids
    assert again == BatchPlan(IDS, 37, 8, 1, 3).batch(2).ids


def test_leaves_of_ranks_and_what_idles() -> None:
    """3 ranks on 8 micro-batches: 3, 3 and 2, so 8/9 of the time is used; 4 ranks on 2: half."""
    assert rank_leaves(8, 3) == (range(3), range(3, 6), range(6, 8))
    assert rank_leaves(2, 4) == (range(1), range(1, 2), range(2, 2), range(2, 2))
    assert efficiency(8, 3) == pytest.approx(8 / 9)
    assert efficiency(2, 4) == pytest.approx(1 / 2)
    assert efficiency(8, 4) == 1.0
    assert GlobalBatch(1, 0, 0, ()).micro_batches(3) == ((), (), ())


@settings(max_examples=50)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=300), batch_size=st.integers(1, 9), seed=st.integers(0, 3)
)
def test_rows_of_similar_length_share_a_batch(lengths: list[int], batch_size: int, seed: int) -> None:
    ids = tuple(range(100, 100 + len(lengths)))
    plan = BatchPlan(ids, batch_size, 4, seed, 2, lengths=tuple(lengths))
    batches = [plan.batch(step).ids for step in range(1, plan.steps_per_epoch + 1)]
    assert sorted(chain(*batches)) == list(ids)
    together = frozenset(epoch_order(ids, seed, 0)[: 50 * batch_size])
    full = [batch for batch in batches if len(batch) == batch_size and together.issuperset(batch)]
    spans = sorted((lengths[batch[0] - 100], lengths[batch[-1] - 100]) for batch in full)
    assert all(lengths[row - 100] <= lengths[after - 100] for batch in full for row, after in pairwise(batch))
    assert all(before[1] <= after[0] for before, after in pairwise(spans))
    assert len(full) == min(50, len(ids) // batch_size)


def test_grouped_batches_are_shuffled_anew_in_each_epoch() -> None:
    lengths = tuple(range(37))
    plan = BatchPlan(IDS, 3, 8, seed=3, epochs=2, lengths=lengths)
    first, second = ([max(plan.batch(step).ids) for step in steps] for steps in (range(1, 13), range(14, 26)))
    assert first != sorted(first)
    assert first != second


def test_batches_may_be_asked_for_in_any_order() -> None:
    plan = BatchPlan(IDS, 10, 8, seed=3, epochs=3)
    there = {step: plan.batch(step) for step in range(1, plan.total_steps + 1)}
    assert {step: plan.batch(step) for step in reversed(there)} == there
    assert plan.epoch_of(0) == 0


# Splits.

counts = st.integers(0, 300)
parts = st.integers(1, 70)


@given(counts, parts)
def test_balanced_ranges_cover_and_differ_by_at_most_one(count: int, number: int) -> None:
    bounds = balanced_bounds(count, number)
    assert [row for start, end in bounds for row in range(start, end)] == list(range(count))
    sizes = [end - start for start, end in bounds]
    assert len(sizes) == number
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


# The learning rate.


def schedule_of(total: int, **settings: Any) -> Schedule:
    return Schedule(Config(optimizer=Optimizer(lr=settings.pop("lr", 1.0)), schedule=Settings(**settings)), total)


def test_values_by_hand() -> None:
    """20 updates, 4 of warm-up: quarters of the peak, then half a cosine from 1.0 to 0.2."""
    schedule = schedule_of(20, warmup_fraction=0.2, min_lr=0.2)
    assert [schedule.rate(step) for step in (1, 2, 3, 4)] == [0.25, 0.5, 0.75, 1.0]
    assert schedule.rate(12) == pytest.approx(0.6)  # halfway from 4 to 20: cos(pi / 2) = 0
    assert schedule.rate(8) == pytest.approx(0.2 + 0.8 * (1 + math.sqrt(0.5)) / 2)  # a quarter: cos(pi / 4)
    assert schedule.rate(20) == 0.2
    line, level = (schedule_of(20, min_lr=0.2, type=kind, warmup_steps=4) for kind in ("linear", "constant"))
    assert [line.rate(step) for step in (2, 4, 20)] == [0.5, 1.0, 0.2]
    assert [line.rate(step) for step in (8, 12)] == pytest.approx([0.8, 0.6])
    assert [level.rate(step) for step in (2, 4, 5, 20)] == [0.5, 1.0, 1.0, 1.0]


@given(
    st.integers(1, 500),
    st.floats(0, 1),
    st.floats(1e-5, 1.0),
    st.floats(0, 1e-5),
    st.sampled_from(("cosine", "linear")),
)
def test_shape(total: int, fraction: float, peak: float, low: float, kind: str) -> None:
    schedule = schedule_of(total, lr=peak, warmup_fraction=fraction, min_lr=low, type=kind)
    rates = [schedule.rate(step) for step in range(1, total + 1)]
    warmup = math.floor(fraction * total)
    same = schedule_of(total, lr=peak, min_lr=low, type=kind, warmup_steps=warmup)
    assert rates == [same.rate(step) for step in range(1, total + 1)]
    assert all(a <= b for a, b in pairwise(rates[:warmup]))
    falling = rates[max(0, warmup - 1) :]
    assert all(a >= b for a, b in pairwise(falling))
    assert max(rates) <= peak
    if warmup:
        assert rates[warmup - 1] == peak
    if warmup < total:
        assert rates[-1] == low
    assert all(rate > 0 for rate in rates[:-1])


# What is refused.

RUN = BatchPlan(IDS, 10, 8, seed=3, epochs=3)


@pytest.mark.parametrize(
    ("work", "said"),
    [
        *((lambda step=step: RUN.batch(step), f"step {step} is outside 1 to 12") for step in (0, 13, -1)),
        (lambda: BatchPlan(IDS, 0, 8, seed=1, epochs=1), "batch_size must be at least 1, got 0"),
        (lambda: BatchPlan(IDS, 1, 0, seed=1, epochs=1), "micro_batches must be at least 1, got 0"),
        (lambda: BatchPlan(IDS, 1, 8, seed=1, epochs=0), "epochs must be at least 1, got 0"),
        (lambda: BatchPlan((), 1, 1, 1, 1), "at least one row"),
        (lambda: BatchPlan(IDS, 3, 8, seed=3, epochs=2, lengths=range(36)), "36 lengths for 37 rows"),  # type: ignore[arg-type]
        (lambda: balanced_bounds(-1, 2), "-1 items into 2 parts"),
        (lambda: balanced_bounds(3, 0), "3 items into 0 parts"),
        (lambda: balanced_bounds(3, -1), "3 items into -1 parts"),
        *((lambda step=step: schedule_of(20).rate(step), f"step {step} is outside 1 to 20") for step in (0, 21)),
    ],
)
def test_what_no_run_can_do_is_refused_with_its_values(work: Callable[[], object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        work()
