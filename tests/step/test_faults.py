"""Every fault planted on one replica is found at its step, by its clause, on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from andon.backend.base import Backend, GroupBackend, InlineBackend
from andon.config.schema import Optimizer
from andon.step.plan import GlobalBatch
from andon.step.replica import Replica
from andon.step.step import RankFailed, TrainingStep
from andon_contracts.policy import suspended
from tests.support.faults import (
    CULPRIT,
    FAULTS,
    SETTINGS,
    WORLD,
    Caught,
    Drive,
    PoisonedTask,
    SteepTask,
    cannot_read,
    catch,
    ordinary,
    violation_of,
)
from tests.support.ranks import run_ranks
from tests.support.toy import CPU, ToyModel, ToyTask, build, rate, replica

pytestmark = pytest.mark.xdist_group("step_faults")
BATCH = SETTINGS.batches()[0]
OWNER = (0, 0, 0, 1, 1, 1, 2, 2)  # micro-batches 0 to 7 over 3 ranks: a balanced split, worked out by hand
SIZES = (2, 2, 1, 1, 1, 1, 1, 1)  # 10 rows over 8 micro-batches
POISONED = [(micro_batch, where) for micro_batch in range(8) for where in ("loss", "gradient")]
CATCHER = Callable[[Backend], Caught]


def _first_row(micro_batch: int) -> int:
    return BATCH.ids[sum(SIZES[:micro_batch])]


def _poisoned(micro_batch: int, where: str) -> CATCHER:
    def caught(backend: Backend) -> Caught:
        step, replicas = build(backend, SETTINGS, PoisonedTask(_first_row(micro_batch), where))
        return violation_of(lambda: ordinary(step, BATCH), replicas)

    return caught


def _steep(backend: Backend) -> Caught:
    step, replicas = build(backend, SETTINGS, SteepTask(2.5e38))
    return violation_of(lambda: ordinary(step, BATCH), replicas)


def _fault(name: str) -> CATCHER:
    return lambda backend: catch(backend, FAULTS[name].plant)


def _driven(other: Drive) -> CATCHER:
    return lambda backend: catch(backend, lambda _: None, other if CULPRIT in backend.ranks else ordinary)


def _other_point(step: TrainingStep, batch: GlobalBatch) -> object:
    step.attest_base(batch.step, 0)
    return None


def _other_data(backend: Backend) -> Caught:
    task = ToyTask()
    if CULPRIT in backend.ranks:
        task.y = (task.y + 1) % 3
    step, replicas = build(backend, SETTINGS, task)
    return violation_of(lambda: ordinary(step, BATCH), replicas)


class _RenamedModel(ToyModel):
    def __init__(self) -> None:
        super().__init__()
        self.third = self.second
        del self.second

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def _start(plant: Callable[[Replica], Any], model: type[nn.Module] = ToyModel) -> CATCHER:
    def caught(backend: Backend) -> Caught:
        replicas = [replica(model if rank == CULPRIT else ToyModel) for rank in backend.ranks]
        step = TrainingStep(backend, replicas, ToyTask(), 8, None)
        for rank, one in zip(backend.ranks, replicas, strict=True):
            if rank == CULPRIT:
                plant(one)
        return violation_of(lambda: step.attest_start({"config": 7}), replicas)

    return caught


def _other_base(backend: Backend) -> Caught:
    step, replicas = build(backend, SETTINGS)
    base = replicas[0].base_digest()
    step.attest_base(1, base)
    for rank, one in zip(backend.ranks, replicas, strict=True):
        if rank == CULPRIT:
            one.model.get_parameter("frozen.bias").data[0] += 1.0
    return violation_of(lambda: step.attest_base(2, base), replicas)


ON_GROUP: Mapping[str, tuple[CATCHER, tuple[str, int, tuple[int, ...], str]]] = {
    "weight": (_fault("weight flipped"), ("replicas-agree", 2, (CULPRIT,), "first.bias")),
    "gradient": (_fault("reduced gradient flipped"), ("gradients-agree", 2, (CULPRIT,), "second.weight")),
    "rows": (_fault("other rows"), ("content-planned", 2, (CULPRIT,), "micro-batch 3")),
    **{
        f"NaN {where} of {number}": (
            _poisoned(number, where),
            ("finite", 1, (OWNER[number],), f"{where} of micro-batch {number}"),
        )
        for number, where in POISONED
    },
    "overflow": (_steep, ("finite", 1, (), "reduced gradient")),
    "step ahead": (
        _driven(lambda step, _: ordinary(step, SETTINGS.batches()[2])),
        ("halt-together", 2, (CULPRIT,), ""),
    ),
    "other point": (_driven(_other_point), ("halt-together", 2, (CULPRIT,), "")),
    "other schedule": (
        _driven(lambda step, batch: step(batch, 2 * rate(batch.step), batch.step)),
        ("learning-rate-planned", 2, (CULPRIT,), "learning rate"),
    ),
    "other data": (_other_data, ("content-planned", 1, (CULPRIT,), "plan")),
    "other layout": (_start(lambda _: None, _RenamedModel), ("layout-equal", 0, (CULPRIT,), "layout")),
    "other start": (_start(FAULTS["weight flipped"].plant), ("start-agrees", 0, (CULPRIT,), "weights")),
    "other base": (_other_base, ("base-frozen", 2, (CULPRIT,), "frozen.bias")),
}
"""The function that runs a fault, and the clause, step, ranks and tensor that all ranks must report."""


def _all_on_a_group() -> Mapping[str, Caught]:
    """Every fault in turn on this rank of a process group: each must leave the group usable for the next."""
    backend = GroupBackend("gloo", CPU)
    return {name: caught(backend) for name, (caught, _) in ON_GROUP.items()}


@pytest.fixture(scope="module")
def on_group() -> list[Mapping[str, Caught]]:
    return [outcome.get() for outcome in run_ranks(WORLD, _all_on_a_group)]


@pytest.mark.parametrize("name", ON_GROUP)
def test_every_process_names_the_same_rank_and_applies_nothing(name: str, on_group: list[Mapping[str, Caught]]) -> None:
    """V9, V10, V29: a NaN loss, and a NaN gradient under a finite loss, stop every rank before the update."""
    for seen in on_group:
        caught = seen[name]
        assert (caught.clause, caught.step, caught.ranks, caught.tensor) == ON_GROUP[name][1]
        assert not caught.applied
        if name.startswith("NaN"):
            assert str(_first_row(int(name[-1]))) in caught.message
    if name not in ("step ahead", "other point"):
        assert len({seen[name].message for seen in on_group}) == 1


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_one_replica_of_three_is_named(name: str) -> None:
    caught, fault = _fault(name)(InlineBackend([CPU] * WORLD)), FAULTS[name]
    assert (caught.clause, caught.step, caught.ranks, caught.tensor) == (fault.clause, 2, (CULPRIT,), fault.tensor)
    assert caught.applied is not fault.early


def test_two_ranks_cannot_tell_who_is_wrong_unless_the_start_is_known() -> None:
    assert _start(FAULTS["weight flipped"].plant)(InlineBackend([CPU] * 2)).ranks == ()
    assert _other_base(InlineBackend([CPU] * 2)).ranks == (CULPRIT,)


def _move_weights(one: Replica) -> None:
    one.parameters.weights.data[0] += 1.0


def _move(moment: str) -> Callable[[Replica], None]:
    def move(one: Replica) -> None:
        one.optimizer_state()[moment][-1] += 1e-3

    return move


@pytest.mark.parametrize(
    ("world", "attested", "updates", "move", "moved", "clause", "ranks"),
    [
        (2, False, 1, _move_weights, (0, 1), "replicas-agree", (0, 1)),
        (2, True, 0, _move_weights, (0, 1), "replicas-agree", (0, 1)),
        (3, False, 0, _move_weights, (0,), "replicas-agree", (0,)),
        (1, False, 2, _move("exp_avg"), (0,), "optimizers-agree", (0,)),
        (1, False, 2, _move("exp_avg_sq"), (0,), "optimizers-agree", (0,)),
    ],
    ids=["all alike", "all alike after the start", "the first, start not attested", "lone average", "lone square"],
)
def test_a_state_that_moved_between_two_updates_is_found_before_it_is_used(
    world: int,
    attested: bool,
    updates: int,
    move: Callable[[Replica], None],
    moved: tuple[int, ...],
    clause: str,
    ranks: tuple[int, ...],
) -> None:
    step, replicas = build(InlineBackend([CPU] * world), replace(SETTINGS, optimizer=Optimizer()))
    if attested:
        step.attest_start({})
    for batch in SETTINGS.batches()[:updates]:
        ordinary(step, batch)
    for rank in moved:
        move(replicas[rank])
    caught = violation_of(lambda: ordinary(step, SETTINGS.batches()[updates]), replicas)
    assert (caught.clause, caught.step, caught.ranks, caught.applied) == (clause, updates + 1, ranks, False)


def test_contracts_off_and_on_give_the_same_bits_and_raise_nothing() -> None:
    on, off = (build(InlineBackend([CPU] * 2), SETTINGS) for _ in range(2))
    first, second, third = SETTINGS.batches()
    for batch in (first, third):
        assert ordinary(on[0], batch) == ordinary(off[0], batch)
        if batch is first:
            checked = ordinary(on[0], second)
            with suspended():
                unchecked = ordinary(off[0], second)
            assert checked.loss == unchecked.loss  # type: ignore[attr-defined]
            assert unchecked.digests == {}  # type: ignore[attr-defined]
    assert on[1][0].weights_digest() == off[1][0].weights_digest()


def _broken_on_culprit(where: str) -> None:
    backend, task = GroupBackend("gloo", CPU), ToyTask()
    if CULPRIT in backend.ranks:
        setattr(task, where, cannot_read)
    ordinary(build(backend, SETTINGS, task)[0], BATCH)


@pytest.mark.parametrize("where", ["load", "planned_content"])
def test_an_ordinary_error_on_one_rank_ends_all_of_them(where: str) -> None:
    outcomes = run_ranks(WORLD, _broken_on_culprit, where)
    assert [type(outcome.error) for outcome in outcomes] == [RankFailed, OSError, RankFailed]
    assert "rank 1 failed" in str(outcomes[0].error)


def test_an_ordinary_error_in_one_process_is_raised() -> None:
    backend, task = InlineBackend([CPU] * WORLD), ToyTask()
    task.load = cannot_read  # type: ignore[method-assign]
    with pytest.raises(OSError, match="cannot be read"):
        ordinary(build(backend, SETTINGS, task)[0], BATCH)


def test_a_model_that_replaces_its_gradient_is_refused() -> None:
    """A gradient outside of the flat buffer would never be applied."""
    step, replicas = build(InlineBackend([CPU]), SETTINGS)
    replicas[0].model.register_forward_hook(lambda module, args, out: module.zero_grad())
    with pytest.raises(RuntimeError, match="would not be trained"):
        ordinary(step, BATCH)
