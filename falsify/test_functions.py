"""The free functions and the coordinator that Andon was made from: tables of calls, and a run by the reference."""

from __future__ import annotations

import pytest

from andon_falsify.claims.of_trainer import verdicts
from andon_falsify.compliance.cases import PLAIN
from andon_falsify.compliance.plugin import Court
from andon_falsify.subjects.coordinator import CoordinatorSubject
from andon_falsify.verdict import Outcome
from falsify.power.functions import TABLES


@pytest.mark.parametrize("name", TABLES)
def test_a_function_gives_what_its_definition_says(name: str) -> None:
    assert TABLES[name]().verdict.outcome is Outcome.HOLDS


@pytest.mark.claim("replicas-agree", "gradient-law", "update-law", "losses-close", "norm-law")
@pytest.mark.parametrize("world", [2, 3])
def test_the_coordinator_keeps_the_law(court: Court, world: int) -> None:
    """`DataParallelCoordinator` on uneven shards and fewer samples than replicas, by the same reference (V1-V8)."""
    coordinator = CoordinatorSubject()
    case = PLAIN.but(world=world)
    trace = coordinator.run(case)
    court.hold(*verdicts(trace, coordinator.run(case.but(world=1))).values())
