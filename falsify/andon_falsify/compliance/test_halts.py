"""What is not finite stops all ranks at its update, before anything is applied, and says where it was."""

from __future__ import annotations

import pytest

from andon_falsify.claims.evidence import of_trace
from andon_falsify.claims.one_run import halted
from andon_falsify.claims.trainer_law import shares
from andon_falsify.compliance.plugin import Court
from andon_falsify.subjects.case import Case, Poison
from andon_falsify.subjects.placing import room_for
from andon_falsify.verdict import Outcome

WORLD = 3
MICRO_BATCHES = 4
"""On 3 ranks they are of ranks 0, 0, 1 and 2: every rank's shard has its turn."""


@pytest.mark.claim("halt-together")
@pytest.mark.parametrize("kind", ["nan", "inf", "gradient"])
@pytest.mark.parametrize("leaf", range(MICRO_BATCHES))
def test_a_poisoned_micro_batch_stops_all_ranks(court: Court, backend: str, leaf: int, kind: str) -> None:
    """NaN and Inf in the loss, and NaN in the gradient under a finite loss, in each micro-batch in turn (F-DP-003)."""
    world = room_for(backend, WORLD)
    owners = [rank for rank, own in enumerate(shares(tuple(range(MICRO_BATCHES)), world)) for _ in own]
    poison = Poison(2, leaf, kind)
    trace = court.run(Case(backend=backend, world=world, micro_batches=MICRO_BATCHES, max_steps=2, poison=poison))
    court.hold(halted(of_trace(trace)))
    assert trace.violation is not None
    assert f"micro-batch {leaf}" in trace.violation[2]
    assert f"on rank {owners[leaf]} " in trace.violation[2]


@pytest.mark.claim("halt-together")
def test_without_the_contracts_the_checkers_see_it(court: Court, backend: str) -> None:
    """The control: with the guard off the run goes on, and that is seen from outside."""
    trace = court.run(
        Case(backend=backend, world=room_for(backend, WORLD), poison=Poison(2, 1, "nan"), contracts=False)
    )
    assert halted(of_trace(trace)).outcome is Outcome.FALSIFIED
