"""The seed's free functions and its coordinator."""

from __future__ import annotations

import pytest

from andon_falsify.claims.functions import average, face, non_finite, shards
from andon_falsify.claims.of_trainer import verdicts
from andon_falsify.compliance.cases import PLAIN
from andon_falsify.compliance.plugin import Court
from andon_falsify.subjects.coordinator import CoordinatorSubject


@pytest.mark.claim("average-law", "non-finite-seen", "shards-law", "coordinator-face")
@pytest.mark.parametrize("tried", [average, non_finite, shards, face], ids=lambda tried: tried.__name__)
def test_the_free_functions_do_what_their_names_say(court: Court, tried: object) -> None:
    """On tables with the expected values of their definitions (R26 to R28, V11 to V13)."""
    assert callable(tried)
    court.hold(tried().verdict)


@pytest.mark.claim("replicas-agree", "gradient-law", "update-law", "losses-close", "norm-law")
@pytest.mark.parametrize("world", [2, 3])
def test_the_coordinator_keeps_the_law(court: Court, world: int) -> None:
    """`DataParallelCoordinator` on uneven shards and fewer samples than replicas, by the same reference (V1-V8)."""
    coordinator = CoordinatorSubject()
    case = PLAIN.but(world=world)
    trace = coordinator.run(case)
    court.hold(*verdicts(trace, coordinator.run(case.but(world=1))).values())
