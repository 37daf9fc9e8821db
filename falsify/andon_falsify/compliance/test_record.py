"""The record: every line linked, every number real, every rate that of the schedule."""

from __future__ import annotations

import pytest

from andon_falsify.checkers import chain_intact, loss_finite, schedule
from andon_falsify.claims.trainer_law import rate_law
from andon_falsify.compliance.plugin import Court
from andon_falsify.subjects.case import Case


@pytest.mark.claim("chain-intact", "loss-finite", "schedule")
@pytest.mark.parametrize("world", [1, 3])
def test_the_ledger_says_what_was_seen(court: Court, backend: str, world: int) -> None:
    """Its lines are whole and linked; its losses and rates are those that were seen from outside."""
    case = Case(backend=backend, world=world, epochs=4)
    trace = court.run(case)
    assert trace.ledger is not None
    court.hold(chain_intact.check(trace.ledger))
    for history in (trace.seen, trace.ledger):
        court.hold(loss_finite.check(history), schedule.check(history, rate_law(case)))
    told = [(step.number, step.ids, step.loss, step.lr, step.grad_norm) for step in trace.ledger.steps]
    assert told == [(step.number, step.ids, step.loss, step.lr, step.grad_norm) for step in trace.seen.steps]
