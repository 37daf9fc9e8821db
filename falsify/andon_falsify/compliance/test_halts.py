"""What is not finite stops all ranks at its update, before anything is applied, and says where it was."""

from __future__ import annotations

import pytest

from andon_falsify.compliance.claims import halted
from andon_falsify.compliance.plugin import Court
from andon_falsify.subjects.case import Case, Poison
from andon_falsify.verdict import Outcome

WORLD = 3
OWNER = (0, 0, 1, 2)
"""Micro-batches 0 to 3 on 3 ranks: every rank's shard has its turn."""


@pytest.mark.claim("halt-together")
@pytest.mark.parametrize("kind", ["nan", "inf", "gradient"])
@pytest.mark.parametrize("leaf", range(len(OWNER)))
def test_a_poisoned_micro_batch_stops_all_ranks(court: Court, backend: str, leaf: int, kind: str) -> None:
    """NaN and Inf in the loss, and NaN in the gradient under a finite loss, in each micro-batch in turn (F-DP-003)."""
    trace = court.run(Case(backend=backend, world=WORLD, max_steps=2, poison=Poison(2, leaf, kind)))
    court.hold(halted(trace))
    assert trace.violation is not None
    assert f"micro-batch {leaf}" in trace.violation[2]
    assert f"on rank {OWNER[leaf]} " in trace.violation[2]


@pytest.mark.claim("halt-together")
def test_without_the_contracts_the_checkers_see_it(court: Court, backend: str) -> None:
    """The control: with the guard off the run goes on, and that is seen from outside."""
    trace = court.run(Case(backend=backend, world=WORLD, poison=Poison(2, 1, "nan"), contracts=False))
    assert halted(trace).outcome is Outcome.FALSIFIED
