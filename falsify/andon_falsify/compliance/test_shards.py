"""The ranks' rows of every batch are disjoint, complete and the planned ones; an epoch visits every row once."""

from __future__ import annotations

import pytest

from andon_falsify.checkers import plan_followed, samples_once
from andon_falsify.claims.trainer_law import planned
from andon_falsify.compliance.plugin import Court
from andon_falsify.subjects.case import Case, make_rows

CASES = {
    "ragged last batch": Case(epochs=2),
    "last batch of one row": Case(rows=make_rows(9), batch_size=4, micro_batches=3),
    "one batch, fewer rows than micro-batches": Case(rows=make_rows(3), batch_size=3, micro_batches=8, epochs=2),
}


@pytest.mark.claim("samples-once", "plan-followed")
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("name", CASES)
def test_every_planned_row_is_used_once(court: Court, backend: str, world: int, name: str) -> None:
    """By the rows that each rank asked its task for, not by what anyone says of them (F-DP-002, C-DP-002)."""
    case = CASES[name].but(backend=backend, world=world)
    trace = court.run(case)
    court.hold(samples_once.check(trace.seen), plan_followed.check(trace.seen, planned(case)))
