"""A run that was cut off and resumed from its files, on another number of ranks too, is the run that was not."""

from __future__ import annotations

import pytest

from andon_falsify.campaign.further import cut_and_resume
from andon_falsify.compliance.plugin import Court
from andon_falsify.faults.planting import ADAMW, MOMENTUM

CASES = {"AdamW": ADAMW.but(epochs=2), "SGD with momentum": MOMENTUM.but(epochs=2)}


@pytest.mark.claim("resume-equal")
@pytest.mark.parametrize(("world", "then", "after"), [(2, 2, 3), (2, 3, 5), (3, 1, 3), (1, 2, 3)])
@pytest.mark.parametrize("name", CASES)
def test_a_resumed_run_is_the_uninterrupted_one(
    court: Court, backend: str, name: str, world: int, then: int, after: int
) -> None:
    """Cut after update 3 or 5 with checkpoints at 2 and 4: updates done again have their bits, and so has the end."""
    court.needs(backend, max(world, then))
    case = CASES[name].but(backend=backend, world=world)
    found = cut_and_resume(court.subject, case, after=after, every=2, world=then, fault=None)
    assert found.taken_up.first.resumed_from == after - after % 2
    court.hold(found.verdict)
