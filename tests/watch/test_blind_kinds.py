"""Right loops written without sight of the watch: each trains what one process would, and none is complained of."""

from __future__ import annotations

import pytest

from tests.support.ranks import run_ranks
from tests.watch.blind import KINDS, LOOPS, weights_of
from tests.watch.clean import Seen
from tests.watch.clean_kinds import run_kinds

STEPS = 20
PER_START = 8
DEADLINE_S = 140.0


@pytest.mark.parametrize("first", range(0, len(LOOPS), PER_START), ids=lambda first: list(LOOPS)[first])
def test_two_ranks_train_what_one_process_trains(first: int) -> None:
    """Each loop is right: its weights are those of one process over the global batch, to the rounding."""
    part = list(LOOPS)[first : first + PER_START]
    (alone,) = (outcome.get() for outcome in run_ranks(1, weights_of, part, STEPS, deadline_s=DEADLINE_S))
    for outcome in run_ranks(2, weights_of, part, STEPS, deadline_s=DEADLINE_S):
        for name, weights in outcome.get().items():
            apart = sum(float((a - b).square().sum()) for a, b in zip(weights, alone[name], strict=True)) ** 0.5
            size = sum(float(p.square().sum()) for p in alone[name]) ** 0.5
            assert apart <= 1e-5 * size, f"{name}: {apart / size:.2g}"


@pytest.mark.parametrize("first", range(0, len(KINDS), PER_START), ids=lambda first: list(KINDS)[first])
def test_a_watch_says_of_them_what_is_announced_and_no_more(first: int) -> None:
    """No violation on any rank, and of suspicions those that docs/watch.md announces; it did look."""
    part = list(KINDS)[first : first + PER_START]
    for outcome in run_ranks(2, run_kinds, part, STEPS, deadline_s=DEADLINE_S):
        seen: dict[str, Seen] = outcome.get()
        assert {name: one.violations for name, one in seen.items() if one.violations} == {}
        suspected = {name: {said.partition(" ")[0] for said in one.suspicions} for name, one in seen.items()}
        assert suspected == {name: KINDS[name].suspected for name in part}
        assert [name for name, one in seen.items() if one.evaluations <= 10 * STEPS / 2] == []
