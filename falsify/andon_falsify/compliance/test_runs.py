"""Several runs of our trainer: elsewhere, against one process, taken up again, without GPUs, and stopped by a NaN."""

from __future__ import annotations

from typing import Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from andon.backend.devices import placement
from andon.config.schema import Run
from andon_falsify.campaign.further import cut_and_resume
from andon_falsify.checkers import losses_close, resume_equal, same_everywhere
from andon_falsify.claims.between import same_bits
from andon_falsify.claims.evidence import of_trace
from andon_falsify.claims.functions import fallback
from andon_falsify.claims.of_trainer import alone, verdicts
from andon_falsify.claims.one_run import halted
from andon_falsify.claims.table import judged_by
from andon_falsify.claims.trainer_law import TrainerLaw, shares
from andon_falsify.compliance.cases import ADAMW, MOMENTUM
from andon_falsify.compliance.plugin import Court
from andon_falsify.subjects.case import Case, Poison, make_rows
from andon_falsify.subjects.placing import room_for
from andon_falsify.verdict import Outcome, not_applicable

EXAMPLES = max(4, settings().max_examples // 6)
"""Each example is two runs and a reference, so a sixth of what the profile gives a cheap property."""

_OPTIMIZERS: st.SearchStrategy[tuple[Literal["adamw", "sgd"], float | None, float, float]] = st.sampled_from(
    [("adamw", 0.5, 1e-2, 0.0), ("sgd", None, 0.05, 0.0), ("sgd", None, 0.02, 0.9), ("adamw", None, 3e-3, 0.0)]
)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Small cases: world sizes, batch sizes, ragged tails, class weights, seeds, with dropout and without."""
    optimizer, clip, rate, momentum = draw(_OPTIMIZERS)
    return Case(
        rows=make_rows(draw(st.integers(3, 11)), draw(st.integers(0, 3))),
        batch_size=draw(st.integers(1, 7)),
        micro_batches=draw(st.integers(1, 6)),
        max_steps=4,
        optimizer=optimizer,
        clip_norm=clip,
        lr=rate,
        momentum=momentum,
        seed=draw(st.integers(0, 5)),
        class_weights=draw(st.sampled_from([None, (1.0, 1.0, 1.0), (0.2, 1.0, 3.0), (1.0, 0.0, 2.0)])),
        architecture=draw(st.sampled_from(["decoder", "encoder"])),
        dropout=draw(st.sampled_from([0.1, 0.3, 0.0])),
        world=draw(st.integers(2, 4)),
    )


@pytest.mark.claim("same-everywhere", "replicas-agree", "gradient-law", "losses-close", "update-law", "plan-followed")
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(case=cases())
def test_one_result_for_every_world(court: Court, backend: str, case: Case) -> None:
    """Rows, loss, gradient, weights and optimizer state have the bits of one rank, and keep every law."""
    court.needs(backend, 2)
    trace = court.run(case.but(backend=backend, world=room_for(backend, case.world)))
    found = verdicts(trace, court.run(alone(trace.case)))
    # Four updates need not be an epoch, so that its visits may be open.
    del found["samples-once"]
    # Rows of one class whose weight is 0 have a gradient of 0, of which nothing can be told.
    court.hold(*(verdict for verdict in found.values() if "0 everywhere" not in verdict.why))


LONG = Case(rows=make_rows(20), batch_size=6, micro_batches=2, epochs=26)
"""Label-sorted; batches of 6, 6, 6 and 2 rows; 104 updates."""
TRAINED = {
    "AdamW, clipped": LONG.but(lr=2e-3),
    "SGD": LONG.but(optimizer="sgd", clip_norm=None, lr=0.02, weight_decay=0.0),
}
BOUND = 1e-6


@pytest.mark.claim("losses-close", "same-everywhere")
@pytest.mark.parametrize("name", TRAINED)
def test_the_loss_after_100_updates_is_that_of_one_process(court: Court, backend: str, name: str) -> None:
    """F-DP-005 and C-DP-001, with a rate that learns: what has learned nothing would agree by itself (V2, V22)."""
    case = TRAINED[name].but(backend=backend)
    trace, base = court.run(case), court.run(alone(case))
    reference = TrainerLaw(trace)
    if reference.why_not:
        court.hold(same_bits(base, trace), not_applicable(losses_close.CLAIM, reference.why_not))
        return
    law = [update.loss for update in reference.trajectory()]
    seen = [reported.loss for reported in trace.first.reported]
    assert law[-1] < 0.75 * law[0], f"nothing was learned: {law[0]} to {law[-1]}"
    court.hold(same_bits(base, trace), losses_close.check(seen, law, bound=BOUND))


RESUMED = {"AdamW": ADAMW.but(epochs=2), "SGD with momentum": MOMENTUM.but(epochs=2)}


@pytest.mark.claim("resume-equal")
@pytest.mark.parametrize(("world", "then", "after"), [(2, 2, 3), (2, 3, 5), (3, 1, 3), (1, 2, 3)])
@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_is_the_uninterrupted_one(
    court: Court, backend: str, name: str, world: int, then: int, after: int
) -> None:
    """Cut after update 3 or 5 with checkpoints at 2 and 4: updates done again have their bits, and so has the end."""
    court.needs(backend, max(world, then))
    case = RESUMED[name].but(backend=backend, world=world)
    found = cut_and_resume(court.subject, case, after=after, every=2, world=then, fault=None)
    assert found.taken_up.first.resumed_from == after - after % 2
    court.hold(judged_by(resume_equal.CLAIM, found.evidence))


@pytest.mark.claim("cpu-fallback")
def test_a_run_that_was_to_use_gpus_goes_on_without(court: Court) -> None:
    """What is chosen without a GPU if the CPU is allowed, what is said; then a run there has the bits of one CPU.

    The choice is a function of how many GPUs there are, so a machine that has some is asked as if it had none.
    """
    court.hold(fallback().verdict)
    backend, devices, note = placement(Run(backend="nccl", workers=2, cpu_fallback=True), 0)
    assert "CPU" in note
    case = Case(world=len(devices), backend=backend)
    chosen, plain = court.run(case), court.run(case.but(world=1, backend="inline"))
    court.hold(same_everywhere.check([plain.seen, chosen.seen]))


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
