"""Right loops written without sight of the watch: each trains what one process would, and none is complained of."""

from __future__ import annotations

import pytest

from tests.support.ranks import run_ranks
from tests.watch.blind import KINDS, seen_of, weights_of

STEPS = 20
PARTS = [tuple(KINDS)[first : first + 8] for first in range(0, len(KINDS), 8)]


@pytest.mark.parametrize("kinds", PARTS, ids=lambda kinds: kinds[0])
def test_two_ranks_train_what_one_process_trains(kinds: tuple[str, ...]) -> None:
    """Each loop is right: its weights are those of one process over the global batch, to the rounding."""
    (alone,) = (outcome.get() for outcome in run_ranks(1, weights_of, kinds, STEPS, deadline_s=120))
    for outcome in run_ranks(2, weights_of, kinds, STEPS, deadline_s=120):
        for kind, weights in outcome.get().items():
            apart = sum(float((a - b).square().sum()) for a, b in zip(weights, alone[kind], strict=True)) ** 0.5
            size = sum(float(p.square().sum()) for p in alone[kind]) ** 0.5
            assert apart <= 1e-4 * size, f"{kind}: {apart / size:.2g}"


@pytest.mark.parametrize("kinds", PARTS, ids=lambda kinds: kinds[0])
def test_a_watch_has_nothing_to_say(kinds: tuple[str, ...]) -> None:
    """Neither a violation nor a suspicion on any rank."""
    for outcome in run_ranks(2, seen_of, kinds, STEPS, deadline_s=140):
        for kind, found in outcome.get().items():
            assert found.evaluations > 0, kind
            assert (found.violations, found.suspicions) == ((), ()), kind
