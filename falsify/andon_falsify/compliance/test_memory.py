"""Live tensor bytes of every replica, counted, against the trainer's own plan and 10 % (F-HET-002)."""

from __future__ import annotations

import pytest

from andon_falsify.claims.evidence import of_trace
from andon_falsify.claims.one_run import memory
from andon_falsify.compliance.plugin import Court
from andon_falsify.faults.planting import BIG

CASES = {"AdamW": BIG, "SGD": BIG.but(optimizer="sgd", momentum=0.0), "encoder": BIG.but(architecture="encoder")}


@pytest.mark.claim("memory-budget")
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_no_replica_outgrows_its_plan(court: Court, backend: str, world: int, name: str) -> None:
    """The peak is within the plan, and what rests between updates does not grow.

    Where ranks share a process, what is done outside of their own work (the reduction) is not counted.
    """
    court.hold(memory(of_trace(court.run(CASES[name].but(backend=backend, world=world)))))
