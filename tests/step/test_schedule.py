"""The learning rate as a pure function of the update's number."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from andon.config.load import load_config
from andon.step.plan import BatchPlan
from andon.step.schedule import WarmupCosine
from andon.training.build import schedule_of
from andon.training.material import prepare
from andon.training.session import run_spec


def test_values_by_hand() -> None:
    """20 updates, 4 of warm-up: quarters of the peak, then half a cosine from 1.0 to 0.2."""
    schedule = WarmupCosine(1.0, 20, warmup_fraction=0.2, min_lr=0.2)
    assert [schedule.rate(step) for step in (1, 2, 3, 4)] == [0.25, 0.5, 0.75, 1.0]
    assert schedule.rate(12) == pytest.approx(0.6)  # halfway from 4 to 20: cos(pi / 2) = 0
    assert schedule.rate(8) == pytest.approx(0.2 + 0.8 * (1 + math.sqrt(0.5)) / 2)  # a quarter: cos(pi / 4)
    assert schedule.rate(20) == 0.2


@given(st.integers(1, 500), st.floats(0, 1), st.floats(1e-5, 1.0), st.floats(0, 1e-5))
def test_shape(total: int, fraction: float, peak: float, low: float) -> None:
    schedule = WarmupCosine(peak, total, fraction, low)
    rates = [schedule.rate(step) for step in range(1, total + 1)]
    warmup = math.floor(fraction * total)
    assert rates == [WarmupCosine(peak, total, fraction, low).rate(step) for step in range(1, total + 1)]
    assert all(a <= b for a, b in pairwise(rates[:warmup]))
    falling = rates[max(0, warmup - 1) :]
    assert all(a >= b for a, b in pairwise(falling))
    assert max(rates) <= peak
    if warmup:
        assert rates[warmup - 1] == peak
    if warmup < total:
        assert rates[-1] == low
    assert all(rate > 0 for rate in rates[:-1])


@pytest.mark.parametrize("step", [0, 21])
def test_a_step_outside_of_the_run_is_refused(step: int) -> None:
    with pytest.raises(ValueError, match=f"step {step} is outside 1 to 20"):
        WarmupCosine(1.0, 20).rate(step)


def test_the_schedule_of_a_configuration() -> None:
    plan = BatchPlan(ids=tuple(range(40)), batch_size=4, micro_batches=2, seed=0, epochs=2, max_steps=None)
    config = load_config(None, ["optimizer.lr=0.5", "schedule.warmup_fraction=0.25", "schedule.min_lr=0.125"])
    schedule = schedule_of(run_spec(config, prepare(config), 1), plan)
    assert plan.total_steps == 20
    assert [schedule.rate(step) for step in (5, 20)] == [0.5, 0.125]
    assert schedule.rate(4) == pytest.approx(0.4)
