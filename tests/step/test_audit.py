"""The audit finds a wrong bit that reaches every rank, so that all replicas agree on it."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from andon.backend.base import Backend, GroupBackend, InlineBackend
from andon.config.schema import Contracts, Optimizer
from andon.model.memory import MemoryPlan, StorageWatch, plan_bytes
from andon.step import flat
from andon.step.audit import default_every
from andon.step.micro_batch import Leaf, Task
from andon.step.plan import GlobalBatch, rank_leaves
from andon.step.reduce import subtree_roots
from andon.step.replica import Replica
from andon.step.step import RankFailed, StepResult, TrainingStep
from andon_contracts import observe
from andon_contracts.policy import evaluations, reset_evaluations
from andon_contracts.violation import Violation
from tests.support.ranks import run_ranks
from tests.support.toy import CPU, SEED, Settings, ToyModel, ToyTask, build, rate, replica, run, trainable

LEAVES, BLOCK = 8, 1 << 12
SETTINGS = Settings(LEAVES, sizes=(16, 16, 5))
ALL = Contracts(audit_every=1, audit_coverage="all")


def audited(backend: Backend, contracts: Contracts, task: Task | None = None) -> tuple[TrainingStep, list[Replica]]:
    replicas = [replica() for _ in backend.ranks]
    return TrainingStep(backend, replicas, task or ToyTask(), LEAVES, 0.2, contracts), replicas


def inline(world: int) -> InlineBackend:
    return InlineBackend([CPU] * world)


def do(step: TrainingStep, batch: GlobalBatch) -> StepResult:
    return step(batch, rate(batch.step), batch.step)


def flip(tensor: torch.Tensor, place: int, bit: int) -> None:
    tensor.view(torch.int32)[place] ^= 1 << bit


def plant_in_gradient(victim: Replica, leaf: int, place: int, bit: int, times: int = 1) -> None:
    inner, left = victim._leaf, [times]

    def wrong(step: int, given: Leaf, task: Task, *, checked: bool) -> torch.Tensor:
        report = inner(step, given, task, checked=checked)
        if given.index == leaf and left[0]:
            left[0] -= 1
            flip(victim.parameters.gradient, place, bit)
        return report

    victim._leaf = wrong  # type: ignore[method-assign, assignment]


def plant_in_sum(victim: Replica, root: int, place: int, bit: int) -> None:
    inner = victim.gradients

    def wrong(*given: Any, **named: Any) -> Any:
        partial = inner(*given, **named)
        flip(list(partial.roots.values())[root], place, bit)
        victim.gradients = inner  # type: ignore[method-assign]
        return partial

    victim.gradients = wrong  # type: ignore[method-assign]


@pytest.mark.parametrize("world", [1, 2, 3, 8, 11])
@pytest.mark.parametrize("coverage", [1, 2, "all"])
def test_an_audit_changes_nothing(world: int, coverage: Any) -> None:
    plain = run(inline(world), replace(SETTINGS, clip_norm=0.2))
    step, replicas = audited(inline(world), Contracts(audit_every=1, audit_coverage=coverage))
    reset_evaluations()
    step.attest_start({})
    for batch, expected in zip(SETTINGS.batches(), plain, strict=True):
        result = do(step, batch)
        assert (result.loss.hex(), result.grad_norm.hex(), dict(result.digests)) == (
            expected["loss"], expected["norm"], expected["digests"],
        )  # fmt: skip
        assert len({r.weights_digest() for r in replicas}) == 1
    assert evaluations()["audit"] == len(SETTINGS.sizes)


FLIPS = 25  # drawn with a fixed seed


@pytest.mark.parametrize("of_sum", [False, True], ids=["gradient", "partial sum"])
def test_a_flipped_bit_is_found_each_time(of_sum: bool) -> None:
    """Full coverage, K = 1: any bit of any element of any micro-batch of any rank, at that step, and no update."""
    draw = random.Random(7)
    for _ in range(FLIPS):
        world = draw.choice([2, 3, 5])
        step, replicas = audited(inline(world), ALL)
        leaf, place, bit = draw.randrange(LEAVES), draw.randrange(20 * 9), draw.randrange(22)
        shares = rank_leaves(LEAVES, world)
        (owner,) = (rank for rank, run in enumerate(shares) if leaf in run)
        wrong = f"gradient of micro-batch {leaf}"
        if of_sum:
            roots = subtree_roots((0, LEAVES), shares[owner].start, shares[owner].stop)
            root = draw.randrange(len(roots))
            plant_in_sum(replicas[owner], root, place, bit)
            wrong = f"partial sum from micro-batch {roots[root][0]} on"
        else:
            plant_in_gradient(replicas[owner], leaf, place, bit)
        with pytest.raises(Violation, match="audit broken at step 1") as caught:
            do(step, SETTINGS.batches()[0])
        assert (caught.value.clause, caught.value.tensor) == ("audit", wrong)
        assert owner in caught.value.finding.ranks
        assert all(r.updates == 0 for r in replicas)


def test_one_pair_that_disagrees_accuses_both_and_several_accuse_one() -> None:
    step, replicas = audited(inline(4), ALL)
    plant_in_gradient(replicas[2], 4, 0, 5)
    with pytest.raises(Violation, match="either of the two ranks may be wrong") as caught:
        do(step, SETTINGS.batches()[0])
    assert len(caught.value.finding.ranks) == 2
    step, replicas = audited(inline(4), ALL)
    for leaf in range(LEAVES):  # a device that is always wrong: as owner, and as auditor of another
        plant_in_gradient(replicas[2], leaf, 0, 5, times=1000)
    with pytest.raises(Violation) as caught:
        do(step, SETTINGS.batches()[0])
    assert caught.value.finding.ranks == (2,)


def test_one_rank_finds_what_passes_and_not_what_persists() -> None:
    step, replicas = audited(inline(1), ALL)
    plant_in_gradient(replicas[0], 3, 0, 5)
    with pytest.raises(Violation, match="if recomputed there") as caught:
        do(step, SETTINGS.batches()[0])
    assert caught.value.rank == 0
    step, replicas = audited(inline(1), ALL)
    plant_in_gradient(replicas[0], 3, 0, 5, times=1000)
    do(step, SETTINGS.batches()[0])
    assert "cannot detect a permanent fault" in step.audit.describe()
    assert "cannot detect" not in audited(inline(2), ALL)[0].audit.describe()


def test_a_flip_is_found_exactly_where_its_micro_batch_is_drawn() -> None:
    step, replicas = audited(inline(2), Contracts(audit_every=1))
    draw = random.Random(9)
    (batch,) = Settings(LEAVES, sizes=(16,)).batches()
    clean = [r._leaf for r in replicas]
    outcomes = set()
    for number in range(1, 51):
        leaf = draw.randrange(LEAVES)
        owner = leaf // 4
        plant_in_gradient(replicas[owner], leaf, draw.randrange(180), draw.randrange(22))
        drawn = leaf in step.audit.chosen(number, owner, range(4 * owner, 4 * owner + 4))
        expected = pytest.raises(Violation, match="audit broken") if drawn else nullcontext()
        with expected:
            step(replace(batch, step=number), 0.01, replicas[0].updates + 1)
        outcomes.add(drawn)
        for each, leaf_work in zip(replicas, clean, strict=True):
            each._leaf = leaf_work  # type: ignore[method-assign]
    assert outcomes == {True, False}


@pytest.mark.parametrize(("coverage", "leaves"), [(1, 4), (2, 4), (1, 8), (3, 5)])
def test_micro_batches_are_drawn_at_the_stated_rate(coverage: int, leaves: int) -> None:
    """Each of L micro-batches is drawn with probability c / L: 1,000 draws lie in the binomial's 99 % interval."""
    step, _ = audited(inline(2), Contracts(audit_every=1, audit_coverage=coverage))
    draw = random.Random(12)
    found = sum(draw.randrange(leaves) in step.audit.chosen(number, 1, range(leaves)) for number in range(1000))
    share = coverage / leaves
    assert abs(found - 1000 * share) <= 2.576 * math.sqrt(1000 * share * (1 - share))


def test_audits_are_due_every_k_steps_and_cost_a_hundredth() -> None:
    """K = ceil(100 W / M): one of the M / W micro-batches of a rank every K steps is at most 1 % of its work."""
    for every, due in ((3, [3, 6, 9]), (0, [])):
        step, _ = audited(inline(2), Contracts(audit_every=every))
        assert [number for number in range(1, 10) if step.audit.due(number)] == due
    assert default_every(2, 8) == 25
    assert default_every(1, 8) == 13
    for world, leaves in ((1, 3), (3, 8), (8, 8), (16, 8)):
        own = leaves / world
        assert 1 / (default_every(world, leaves) * own) <= 0.01
        assert 1 / ((default_every(world, leaves) - 1) * own) > 0.01


def _rank_with_flip(coverage: Any) -> tuple[str, tuple[int, ...], int, int]:
    backend = GroupBackend("gloo", CPU)
    step, (own,) = audited(backend, Contracts(audit_every=1, audit_coverage=coverage))
    first, second, third = SETTINGS.batches()
    do(step, first)
    do(step, second)
    if backend.ranks[0] == 1:
        plant_in_sum(own, 0, 3, 20)
    try:
        do(step, third)
    except Violation as violation:
        return violation.clause, violation.finding.ranks, violation.step, own.updates
    return "", (), 0, own.updates


@pytest.mark.parametrize("coverage", [1, "all"])
def test_ranks_of_a_group_audit_each_other(coverage: Any) -> None:
    outcomes = [outcome.get() for outcome in run_ranks(2, _rank_with_flip, coverage)]
    assert outcomes == [("audit", (0, 1), 3, 2)] * 2


class _FailsOnce(ToyTask):
    """A task that fails in the second forward pass of micro-batch 0's first row: the auditor's."""

    def __init__(self, row: int) -> None:
        super().__init__()
        self.row, self.seen = row, 0

    def load(self, ids: Sequence[int], device: torch.device) -> Any:
        self.seen += self.row in ids
        if self.row in ids and self.seen == 2:
            raise MemoryError("no memory for the audit")
        return super().load(ids, device)


def _rank_that_fails(row: int) -> str:
    backend = GroupBackend("gloo", CPU)
    # Rank 0 computes the row once and rank 1, its auditor, once: only there is a second pass an audit.
    task = _FailsOnce(row)
    task.seen = backend.ranks[0]
    step, _ = audited(backend, ALL, task)
    try:
        do(step, SETTINGS.batches()[0])
    except (RankFailed, MemoryError) as error:
        return type(error).__name__
    return "nothing"


def test_other_ranks_learn_that_an_audit_failed() -> None:
    first = SETTINGS.batches()[0].ids[0]
    assert [outcome.get() for outcome in run_ranks(2, _rank_that_fails, first)] == ["RankFailed", "MemoryError"]


def test_an_unaudited_step_records_no_digest_of_gradients() -> None:
    step, _ = build(inline(2), SETTINGS)
    assert {leaf.gradient for leaf in do(step, SETTINGS.batches()[0]).leaves} == {0}
    step, _ = audited(inline(2), ALL)
    assert 0 not in {leaf.gradient for leaf in do(step, SETTINGS.batches()[0]).leaves}


class _Wide(ToyModel):
    """Its gradient, 1.2 MB, is far larger than its activations."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = torch.nn.Linear(20, 512), torch.nn.Linear(512, 512)
        self.second = torch.nn.Linear(512, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.second(torch.tanh(self.middle(torch.tanh(self.first(self.frozen(x))))))
        return logits


def _peak(leaves: int, coverage: Any, optimizer: str = "sgd", backend: Backend | None = None) -> int:
    settings = Settings(leaves, sizes=(16, 16, 16), optimizer=Optimizer(name=optimizer))
    torch.manual_seed(0)
    own = Replica(model := _Wide(), trainable(model), settings.optimizer, SEED, CPU, backend=backend)
    contracts = Contracts(audit_every=1, audit_coverage=coverage) if coverage else Contracts(audit_every=0)
    step = TrainingStep(backend or inline(1), [own], ToyTask(), leaves, None, contracts)
    with StorageWatch() as watch:
        for batch in settings.batches():
            do(step, batch)
    return watch.peak


def _planned(activations: int, leaves: int, coverage: Any, optimizer: str = "sgd", world: int = 1) -> MemoryPlan:
    how: Any = {"world_size": world, "audited": leaves if coverage == "all" else coverage, "divided": True}
    return plan_bytes(model := _Wide(), trainable(model), optimizer, leaves, activations, **how)


@pytest.mark.parametrize("leaves", [1, 2, 8, 11])
@pytest.mark.parametrize("coverage", [0, 1, 3, "all"])
def test_an_audited_step_needs_what_is_planned(leaves: int, coverage: Any) -> None:
    """F-HET-002. An audit copies sums and gradients, each as large as the gradient."""
    plain = _planned(0, leaves, 0)
    activations = _peak(leaves, 0) - (plain.base + plain.weights + plain.gradient + plain.partials)
    plan, found = _planned(activations, leaves, coverage), _peak(leaves, coverage)
    assert found <= 1.01 * plan.total <= 1.25 * found


def _plans_and_peaks(world: int, activations: int) -> list[tuple[MemoryPlan, int]]:
    flat.BLOCK, flat.LEAST, observe._PIECE, flat._BUCKET_BLOCKS = BLOCK, 1, BLOCK, 16
    backend, cases = GroupBackend("gloo", CPU), [(LEAVES, coverage, "adamw") for coverage in (0, 1, "all")]
    return [(_planned(activations, *case, world), _peak(*case, backend)) for case in cases]


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_that_divide_the_optimizer_need_what_is_planned(world: int) -> None:
    plain = _planned(0, LEAVES, 0)
    activations = _peak(LEAVES, 0) - (plain.base + plain.weights + plain.gradient + plain.partials)
    outcomes = run_ranks(world, _plans_and_peaks, world, activations)
    for by_rank in zip(*(outcome.get() for outcome in outcomes), strict=True):
        plan, found = by_rank[0][0], max(peak for _, peak in by_rank)
        assert 3 * plan.weights <= world * plan.moments <= 3.3 * plan.weights
        assert plan.saving == 2 * plan.weights
        assert found <= 1.01 * plan.total <= 1.25 * found
