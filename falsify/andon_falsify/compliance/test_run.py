"""One run of our trainer: its rows, its ranks' state and layout, every update by the law, its record, its memory."""

from __future__ import annotations

from typing import Literal

import pytest

from andon_falsify.claims import (
    base_frozen,
    chain_intact,
    gradient_law,
    judged,
    judged_by,
    layout_equal,
    loss_finite,
    losses_close,
    memory_budget,
    norm_law,
    plan_followed,
    replicas_agree,
    samples_once,
    schedule,
    update_law,
)
from andon_falsify.claims.evidence import of_trace
from andon_falsify.claims.laws import rate_law
from andon_falsify.compliance.cases import BIG
from andon_falsify.compliance.plugin import Court
from andon_falsify.subjects.case import Case, make_rows
from andon_falsify.subjects.placing import room_for

PLANS = {
    "ragged last batch": Case(epochs=2),
    "last batch of one row": Case(rows=make_rows(9), batch_size=4, micro_batches=3),
    "one batch, fewer rows than micro-batches": Case(rows=make_rows(3), batch_size=3, micro_batches=8, epochs=2),
}


@pytest.mark.claim("samples-once", "plan-followed")
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("name", PLANS)
def test_every_planned_row_is_used_once(court: Court, backend: str, world: int, name: str) -> None:
    """By the rows that each rank asked its task for, not by what anyone says of them (F-DP-002, C-DP-002)."""
    case = PLANS[name].but(backend=backend, world=world)
    trace = court.run(case)
    court.hold(samples_once.check(of_trace(trace)), plan_followed.check(of_trace(trace)))


STATES = {
    "decoder, AdamW, clipped": Case(epochs=2),
    "encoder, SGD with momentum": Case(architecture="encoder", optimizer="sgd", momentum=0.9, clip_norm=None, lr=0.05),
    "every weight, SGD": Case(rank=0, optimizer="sgd", clip_norm=None, lr=0.05, weight_decay=0.0),
    "fewer rows than ranks": Case(rows=make_rows(7), batch_size=3, micro_batches=5),
}


@pytest.mark.claim("replicas-agree", "base-frozen")
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", STATES)
def test_all_ranks_hold_the_same_state_after_every_update(court: Court, backend: str, world: int, name: str) -> None:
    """Compared by SHA-256 of the tensors themselves, and by what the ledger says (C-DP-001, F-DP-001)."""
    trace = court.run(STATES[name].but(backend=backend, world=world))
    assert trace.ledger is not None
    court.hold(*map(replicas_agree.check_history, (trace.seen, trace.ledger)), base_frozen.check(of_trace(trace)))


@pytest.mark.claim("layout-equal")
@pytest.mark.parametrize("architecture", ["decoder", "encoder"])
def test_the_layout_is_one(court: Court, backend: str, architecture: Literal["decoder", "encoder"]) -> None:
    """Read from the addresses of the parameters after construction, on every rank, and against one inline rank."""
    case = Case(architecture=architecture, world=room_for(backend, 3), backend=backend)
    trace, alone = court.run(case), court.run(case.but(world=1, backend="inline"))
    both = {f"{backend} rank 0": trace.first.layouts[0], "inline": alone.first.layouts[0]}
    court.hold(layout_equal.check(of_trace(trace)), layout_equal.check_layouts(both))


UPDATES = {
    "decoder, AdamW, clipped": Case(epochs=2),
    "decoder, SGD": Case(optimizer="sgd", clip_norm=None, lr=0.05, class_weights=(0.5, 1.0, 2.0)),
    "encoder, SGD": Case(architecture="encoder", optimizer="sgd", clip_norm=None, lr=0.05),
    "every weight, AdamW": Case(rank=0, lr=1e-3, clip_norm=None),
    "two layers, one-row batches": Case(rows=make_rows(4), layers=2, batch_size=1, micro_batches=2),
}


@pytest.mark.claim("gradient-law", "losses-close", "norm-law", "update-law")
@pytest.mark.parametrize("name", UPDATES)
def test_every_update_is_that_of_the_law(court: Court, backend: str, name: str) -> None:
    """From the accused's weights before each update and his masks; label-sorted rows, ragged micro-batches (V1, V8)."""
    trace = court.run(UPDATES[name].but(backend=backend, world=room_for(backend, 3)))
    court.hold(
        *judged(of_trace(trace), (gradient_law.CLAIM, losses_close.CLAIM, norm_law.CLAIM, update_law.CLAIM)).values()
    )


@pytest.mark.claim("chain-intact", "loss-finite", "schedule")
@pytest.mark.parametrize("world", [1, 3])
def test_the_ledger_says_what_was_seen(court: Court, backend: str, world: int) -> None:
    """Its lines are whole and linked; its losses and rates are those that were seen from outside."""
    case = Case(backend=backend, world=world, epochs=4)
    trace = court.run(case)
    assert trace.ledger is not None
    court.hold(chain_intact.check_history(trace.ledger))
    for history in (trace.seen, trace.ledger):
        court.hold(loss_finite.check_history(history), schedule.check_history(history, rate_law(case)))
    told = [(step.number, step.ids, step.loss, step.lr, step.grad_norm) for step in trace.ledger.steps]
    assert told == [(step.number, step.ids, step.loss, step.lr, step.grad_norm) for step in trace.seen.steps]


SIZES = {"AdamW": BIG, "SGD": BIG.but(optimizer="sgd", momentum=0.0), "encoder": BIG.but(architecture="encoder")}


@pytest.mark.claim("memory-budget")
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("name", SIZES)
def test_no_replica_outgrows_its_plan(court: Court, backend: str, world: int, name: str) -> None:
    """The peak is within the plan, and what rests between updates does not grow.

    Where ranks share a process, what is done outside of their own work (the reduction) is not counted.
    """
    court.hold(judged_by(memory_budget.CLAIM, of_trace(court.run(SIZES[name].but(backend=backend, world=world)))))
