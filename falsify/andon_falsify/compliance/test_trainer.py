"""Every claim about our own trainer, on cases written by hand and on drawn ones, by the bench of `andon falsify`."""

from __future__ import annotations

from typing import Literal

import pytest

from andon.backend.devices import placement
from andon.config.schema import Run
from andon_falsify.campaign.trial import BUDGETS, HALT, LAW, MEMORY, RESUME, Layouts, Trial, draw
from andon_falsify.claims import halt_together, layout_equal
from andon_falsify.claims.laws import shares
from andon_falsify.compliance.cases import ADAMW, BIG, MOMENTUM
from andon_falsify.compliance.plugin import ClaimRunner
from andon_falsify.subjects.case import Case, Poison, make_rows
from andon_falsify.subjects.placing import room_for
from andon_falsify.verdict import Outcome

PLANS = {
    "ragged last batch": Case(epochs=2),
    "last batch of one row": Case(rows=make_rows(9), batch_size=4, micro_batches=3),
    "fewer rows than micro-batches": Case(rows=make_rows(3), batch_size=3, micro_batches=8, epochs=2),
}
LAWS = {
    "fewer rows than ranks": Case(rows=make_rows(7), batch_size=3, micro_batches=5),
    "SGD, class weights": Case(optimizer="sgd", clip_norm=None, lr=0.05, class_weights=(0.5, 1.0, 2.0)),
    "encoder, SGD with momentum": Case(architecture="encoder", optimizer="sgd", momentum=0.9, clip_norm=None, lr=0.05),
    "every weight, SGD": Case(rank=0, optimizer="sgd", clip_norm=None, lr=0.05, weight_decay=0.0),
    "every weight, AdamW": Case(rank=0, lr=1e-3, clip_norm=None),
    "two layers, one-row batches": Case(rows=make_rows(4), layers=2, batch_size=1, micro_batches=2),
}
LONG = Case(rows=make_rows(20), batch_size=6, micro_batches=2, epochs=26)
"""Label-sorted; batches of 6, 6, 6 and 2 rows; 104 updates, for F-DP-005 and C-DP-001."""
TRAINED = {
    "104 updates, AdamW": LONG.but(lr=2e-3),
    "104 updates, SGD": LONG.but(optimizer="sgd", clip_norm=None, lr=0.02, weight_decay=0.0),
}
SIZES = {"AdamW": BIG, "SGD": BIG.but(optimizer="sgd", momentum=0.0), "encoder": BIG.but(architecture="encoder")}
RESUMED = {"AdamW": ADAMW.but(epochs=2), "SGD with momentum": MOMENTUM.but(epochs=2)}
CUTS = [(2, 2, 3), (2, 3, 5), (3, 1, 3), (1, 2, 3)]
"""Ranks before and after the cut, and the update that it follows; checkpoints are at updates 2 and 4."""
TRIALS = {
    f"{name}, world {world}": Trial(LAW, case.but(world=world))
    for cases, worlds in ((PLANS, (1, 2, 3, 4)), (LAWS, (2, 3)), (TRAINED, (2,)))
    for name, case in cases.items()
    for world in worlds
}
TRIALS |= {
    f"memory: {name}, world {world}": Trial(MEMORY, case.but(world=world))
    for name, case in SIZES.items()
    for world in (1, 2, 3)
}
TRIALS |= {
    f"resumed: {name}, world {world} then {then}": Trial(
        RESUME, case.but(world=world, stop_after=after, checkpoint_every=2), then_world=then
    )
    for name, case in RESUMED.items()
    for world, then, after in CUTS
}


DRAWN = draw(0, BUDGETS["standard"], Layouts(("inline",), (2, 3, 4), (1, 2)), (LAW,))
TRIALS |= {f"drawn {at}": trial for at, trial in enumerate(DRAWN) if not at % 5}


@pytest.mark.parametrize("name", TRIALS)
def test_every_claim_of_a_trial(runner: ClaimRunner, backend: str, name: str) -> None:
    """Rows, state and layout of every rank, each update by the law, ledger and memory; and the bits of one rank."""
    runner.attempt(TRIALS[name], backend)


@pytest.mark.parametrize("name", TRAINED)
def test_the_ledger_records_what_was_observed(runner: ClaimRunner, backend: str, name: str) -> None:
    """Rows, losses, rates and norms; the loss falls, since a run that learns nothing is equal to any other such run."""
    trace = runner.run(TRAINED[name].but(backend=backend, world=room_for(backend, 2)))
    assert trace.ledger is not None
    recorded, observed = (
        [(step.number, step.ids, step.loss, step.lr, step.grad_norm) for step in history.steps]
        for history in (trace.ledger, trace.seen)
    )
    assert recorded == observed
    first, last = (trace.seen.steps[at].loss for at in (0, -1))
    assert last is not None
    assert first is not None
    assert (last.value or 1) < 0.75 * (first.value or 0)


@pytest.mark.parametrize("architecture", ["decoder", "encoder"])
def test_the_layout_is_that_of_one_rank(
    runner: ClaimRunner, backend: str, architecture: Literal["decoder", "encoder"]
) -> None:
    case = Case(architecture=architecture, world=room_for(backend, 3), backend=backend)
    trace, alone = runner.run(case), runner.run(case.but(world=1, backend="inline"))
    runner.require(layout_equal.check_layouts({backend: trace.first.layouts[0], "inline": alone.first.layouts[0]}))


def test_without_gpus_a_run_falls_back_to_cpus(runner: ClaimRunner) -> None:
    """Ask for a placement as if there were no GPU. A run there has the bits of one CPU."""
    backend, devices, note = placement(Run(backend="nccl", workers=2, cpu_fallback=True), 0)
    assert "CPU" in note
    runner.attempt(Trial(LAW, Case(world=len(devices), backend=backend)), backend)


WORLD = 3
MICRO_BATCHES = 4
"""On 3 ranks they belong to ranks 0, 0, 1 and 2: every rank's shard is poisoned in turn."""


@pytest.mark.parametrize("kind", ["nan", "inf", "gradient"])
@pytest.mark.parametrize("leaf", range(MICRO_BATCHES))
def test_a_poisoned_micro_batch_stops_all_ranks(runner: ClaimRunner, backend: str, leaf: int, kind: str) -> None:
    """NaN or Inf in the loss, or NaN in the gradient under a finite loss (F-DP-003); the violation names the place."""
    world = room_for(backend, WORLD)
    case = Case(backend=backend, world=world, micro_batches=MICRO_BATCHES, max_steps=2, poison=Poison(2, leaf, kind))
    runner.attempt(Trial(HALT, case), backend)
    violation = runner.run(case).violation
    owners = [rank for rank, own in enumerate(shares(tuple(range(MICRO_BATCHES)), world)) for _ in own]
    assert violation is not None
    assert f"micro-batch {leaf}" in violation[2]
    assert f"on rank {owners[leaf]} " in violation[2]


def test_without_the_contracts_a_poisoned_run_is_falsified(runner: ClaimRunner, backend: str) -> None:
    """The control: with the contracts off the run goes on, and the check sees it."""
    case = Case(world=room_for(backend, WORLD), backend=backend, poison=Poison(2, 1, "nan"), contracts=False)
    assert runner.bench.attempt(Trial(HALT, case))[halt_together.CLAIM.name].outcome is Outcome.FALSIFIED
