"""Every fault planted on one replica is found at its step, by the clause that names it, on every rank alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from andon.backend.base import Backend
from andon.backend.group import GroupBackend
from andon.backend.inprocess import InlineBackend, ThreadsBackend
from andon.step.optimizer import OptimizerSpec
from andon.step.plan import GlobalBatch
from andon.step.replica import Replica
from andon.step.step import RankFailed, TrainingStep
from andon_contracts.policy import suspended
from andon_contracts.violation import Violation
from tests.support.faults import (
    CULPRIT,
    FAULTS,
    SETTINGS,
    WORLD,
    Caught,
    Drive,
    PoisonedTask,
    SteepTask,
    catch,
    ordinary,
    violation_of,
)
from tests.support.ranks import Outcome, run_ranks
from tests.support.toy import CPU, ToyModel, ToyTask, build, rate, replica

BATCH = SETTINGS.batches()[0]
OWNER = (0, 0, 0, 1, 1, 1, 2, 2)
"""Micro-batches 0 to 7 over 3 ranks: a balanced split, worked out by hand."""
SIZES = (2, 2, 1, 1, 1, 1, 1, 1)
"""10 rows over 8 micro-batches."""


def _first_row(micro_batch: int) -> int:
    return BATCH.ids[sum(SIZES[:micro_batch])]


def _poisoned(backend: Backend, micro_batch: int, where: str) -> Caught:
    step, replicas = build(backend, SETTINGS, PoisonedTask(_first_row(micro_batch), where))
    return violation_of(lambda: ordinary(step, BATCH), replicas)


def _steep(backend: Backend) -> Caught:
    step, replicas = build(backend, SETTINGS, SteepTask(2.5e38))
    return violation_of(lambda: ordinary(step, BATCH), replicas)


def _unmoved(_: Replica) -> None:
    """The fault is in what the culprit calls."""


def _on_culprit(backend: Backend, other: Drive) -> Drive:
    return other if CULPRIT in backend.ranks else ordinary


def _step_ahead(step: TrainingStep, _: GlobalBatch) -> object:
    return ordinary(step, SETTINGS.batches()[2])


def _other_point(step: TrainingStep, batch: GlobalBatch) -> object:
    step.attest_base(batch.step, 0)
    return None


def _other_schedule(step: TrainingStep, batch: GlobalBatch) -> object:
    return step(batch, 2 * rate(batch.step), batch.step)


class _OtherLabels(ToyTask):
    def __init__(self) -> None:
        super().__init__()
        self.y = (self.y + 1) % 3


def _other_data(backend: Backend) -> Caught:
    step, replicas = build(backend, SETTINGS, _OtherLabels() if CULPRIT in backend.ranks else None)
    return violation_of(lambda: ordinary(step, BATCH), replicas)


class _RenamedModel(ToyModel):
    def __init__(self) -> None:
        super().__init__()
        self.third = self.second
        del self.second

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def _start(backend: Backend, plant: Callable[[Replica], Any], model: type[nn.Module] = ToyModel) -> Caught:
    replicas = [replica(model if rank == CULPRIT else ToyModel) for rank in backend.ranks]
    step = TrainingStep(backend, replicas, ToyTask(), 8, None)
    for rank, one in zip(backend.ranks, replicas, strict=True):
        if rank == CULPRIT:
            plant(one)
    return violation_of(lambda: step.attest_start({"config": 7}), replicas)


def _other_base(backend: Backend) -> Caught:
    step, replicas = build(backend, SETTINGS)
    base = replicas[0].base_digest()
    step.attest_base(1, base)
    for rank, one in zip(backend.ranks, replicas, strict=True):
        if rank == CULPRIT:
            one.model.get_parameter("frozen.bias").data[0] += 1.0
    return violation_of(lambda: step.attest_base(2, base), replicas)


def _all_on_a_group() -> Mapping[str, Caught]:
    backend = GroupBackend("gloo", CPU)
    found = {name: catch(backend, fault.plant) for name, fault in FAULTS.items()}
    for where in ("loss", "gradient"):
        for micro_batch in range(8):
            found[f"{where} of {micro_batch}"] = _poisoned(backend, micro_batch, where)
    found["overflow"] = _steep(backend)
    found["step ahead"] = catch(backend, _unmoved, _on_culprit(backend, _step_ahead))
    found["other point"] = catch(backend, _unmoved, _on_culprit(backend, _other_point))
    found["other schedule"] = catch(backend, _unmoved, _on_culprit(backend, _other_schedule))
    found["other data"] = _other_data(backend)
    found["other layout"] = _start(backend, _unmoved, _RenamedModel)
    found["other start"] = _start(backend, FAULTS["weight flipped"].plant)
    found["other base"] = _other_base(backend)
    return found


@pytest.fixture(scope="module")
def on_group() -> list[Mapping[str, Caught]]:
    return [outcome.get() for outcome in run_ranks(WORLD, _all_on_a_group)]


@pytest.fixture(params=[InlineBackend, ThreadsBackend])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    made = request.param([CPU] * WORLD)
    yield made
    made.close()


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_one_process_is_named(name: str, backend: Backend) -> None:
    caught, fault = catch(backend, FAULTS[name].plant), FAULTS[name]
    assert (caught.clause, caught.step, caught.ranks, caught.tensor) == (fault.clause, 2, (CULPRIT,), fault.tensor)
    assert caught.applied is not fault.early


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_one_of_three_processes_is_named_by_all(name: str, on_group: list[Mapping[str, Caught]]) -> None:
    fault = FAULTS[name]
    for seen in on_group:
        caught = seen[name]
        assert (caught.clause, caught.step, caught.ranks, caught.tensor) == (fault.clause, 2, (CULPRIT,), fault.tensor)
        assert caught.message == on_group[0][name].message
        if fault.early:
            assert not caught.applied


@pytest.mark.parametrize("where", ["loss", "gradient"])
@pytest.mark.parametrize("micro_batch", range(8))
def test_nan_in_any_micro_batch_stops_all(micro_batch: int, where: str, on_group: list[Mapping[str, Caught]]) -> None:
    """A NaN loss, and a NaN gradient under a finite loss, stop every rank before the update (V9, V10, V29)."""
    inline = _poisoned(InlineBackend([CPU] * WORLD), micro_batch, where)
    for caught in [inline, *(seen[f"{where} of {micro_batch}"] for seen in on_group)]:
        assert caught == inline
        assert (caught.clause, caught.step, caught.ranks) == ("finite", 1, (OWNER[micro_batch],))
        assert caught.tensor == f"{where} of micro-batch {micro_batch}"
        assert str(_first_row(micro_batch)) in caught.message
        assert not caught.applied


def test_an_overflow_in_the_reduction_stops_all(on_group: list[Mapping[str, Caught]]) -> None:
    inline = _steep(InlineBackend([CPU] * WORLD))
    for caught in [inline, *(seen["overflow"] for seen in on_group)]:
        assert caught == inline
        assert (caught.clause, caught.ranks, caught.tensor) == ("finite", (), "reduced gradient")
        assert not caught.applied


@pytest.mark.parametrize(
    ("name", "clause", "step", "tensor"),
    [
        ("step ahead", "halt-together", 2, ""),
        ("other point", "halt-together", 2, ""),
        ("other schedule", "learning-rate-planned", 2, "learning rate"),
        ("other data", "content-planned", 1, "plan"),
        ("other layout", "layout-equal", 0, "layout"),
        ("other start", "start-agrees", 0, "weights"),
        ("other base", "base-frozen", 2, "frozen.bias"),
    ],
)
def test_a_process_that_goes_its_own_way_is_named_by_all(
    name: str, clause: str, step: int, tensor: str, on_group: list[Mapping[str, Caught]]
) -> None:
    for seen in on_group:
        caught = seen[name]
        assert (caught.clause, caught.step, caught.ranks, caught.tensor) == (clause, step, (CULPRIT,), tensor)
        assert not caught.applied
    if name not in ("step ahead", "other point"):
        assert len({seen[name].message for seen in on_group}) == 1


@pytest.mark.parametrize("fault", [_start, _other_base])
def test_two_ranks_cannot_tell_who_is_wrong(fault: Callable[..., Caught]) -> None:
    if fault is _other_base:
        assert fault(InlineBackend([CPU] * 2)).ranks == (CULPRIT,)  # the start is known, so here somebody can tell
    else:
        assert fault(InlineBackend([CPU] * 2), FAULTS["weight flipped"].plant).ranks == ()


def test_weights_that_all_ranks_moved_alike_are_found() -> None:
    step, replicas = build(InlineBackend([CPU] * 2), SETTINGS)
    ordinary(step, SETTINGS.batches()[0])
    for one in replicas:
        one.parameters.weights.data[0] += 1.0
    caught = violation_of(lambda: ordinary(step, SETTINGS.batches()[1]), replicas)
    assert (caught.clause, caught.step, caught.ranks, caught.applied) == ("replicas-agree", 2, (0, 1), False)


@pytest.mark.parametrize("moment", ["exp_avg", "exp_avg_sq"])
def test_a_moment_of_a_lone_rank_that_moved_is_found_before_it_is_used(moment: str) -> None:
    step, (lone,) = build(InlineBackend([CPU]), replace(SETTINGS, optimizer=OptimizerSpec()))
    ordinary(step, SETTINGS.batches()[0])
    ordinary(step, SETTINGS.batches()[1])
    lone.optimizer_state()[moment][-1] += 1e-3
    caught = violation_of(lambda: ordinary(step, SETTINGS.batches()[2]), [lone])
    assert (caught.clause, caught.step, caught.ranks, caught.applied) == ("optimizers-agree", 3, (0,), False)


def test_weights_that_moved_after_the_start_are_found_at_the_first_update() -> None:
    step, replicas = build(InlineBackend([CPU] * 2), SETTINGS)
    step.attest_start({})
    for one in replicas:
        one.parameters.weights.data[0] += 1.0
    caught = violation_of(lambda: ordinary(step, SETTINGS.batches()[0]), replicas)
    assert (caught.clause, caught.step, caught.applied) == ("replicas-agree", 1, False)


def test_without_an_attested_start_the_odd_rank_is_named() -> None:
    step, replicas = build(InlineBackend([CPU] * 3), SETTINGS)
    replicas[0].parameters.weights.data[0] += 1.0
    caught = violation_of(lambda: ordinary(step, SETTINGS.batches()[0]), replicas)
    assert (caught.clause, caught.ranks, caught.tensor) == ("replicas-agree", (0,), "first.weight")


def test_switching_the_contracts_off_and_on_raises_nothing() -> None:
    step, _ = build(InlineBackend([CPU] * 2), SETTINGS)
    first, second, third = SETTINGS.batches()
    ordinary(step, first)
    with suspended():
        ordinary(step, second)
    ordinary(step, third)


def test_off_and_on_give_the_same_bits() -> None:
    on, off = (build(InlineBackend([CPU] * 2), SETTINGS) for _ in range(2))
    for batch in SETTINGS.batches():
        result = ordinary(on[0], batch)
        with suspended():
            unchecked = ordinary(off[0], batch)
        assert result.loss == unchecked.loss  # type: ignore[attr-defined]
        assert unchecked.digests == {}  # type: ignore[attr-defined]
    assert on[1][0].weights_digest() == off[1][0].weights_digest()


class _Broken(ToyTask):
    """Raises where it is told to."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self._where = where

    def load(self, ids: Any, device: torch.device) -> Any:
        if self._where == "load":
            raise OSError("the rows cannot be read")
        return super().load(ids, device)

    def planned_content(self, ids: Any) -> torch.Tensor:
        if self._where == "planned_content":
            raise OSError("the rows cannot be read")
        return super().planned_content(ids)


def _broken_on_culprit(where: str) -> None:
    backend = GroupBackend("gloo", CPU)
    step, _ = build(backend, SETTINGS, _Broken(where) if CULPRIT in backend.ranks else None)
    ordinary(step, BATCH)


@pytest.mark.parametrize("where", ["load", "planned_content"])
def test_an_ordinary_error_on_one_rank_ends_all_of_them(where: str) -> None:
    outcomes: list[Outcome] = run_ranks(WORLD, _broken_on_culprit, where)
    assert [type(outcome.error) for outcome in outcomes] == [RankFailed, OSError, RankFailed]
    assert "rank 1 failed" in str(outcomes[0].error)


def test_an_ordinary_error_in_a_thread_is_raised(backend: Backend) -> None:
    step, _ = build(backend, SETTINGS, _Broken("load"))
    with pytest.raises(OSError, match="cannot be read"):
        ordinary(step, BATCH)


def test_a_model_that_replaces_its_gradient_is_refused() -> None:
    """A gradient outside of the flat buffer would never be applied; that is an error and no silent loss."""
    step, replicas = build(InlineBackend([CPU]), SETTINGS)
    replicas[0].model.register_forward_hook(lambda module, args, out: module.zero_grad())
    with pytest.raises(RuntimeError, match="would not be trained"):
        ordinary(step, BATCH)


def test_violations_stop_at_the_step_and_not_after_it() -> None:
    backend = InlineBackend([CPU] * 2)
    step, replicas = build(backend, SETTINGS, PoisonedTask(BATCH.ids[0], "loss"))
    with pytest.raises(Violation):
        ordinary(step, BATCH)
    good = TrainingStep(backend, replicas, ToyTask(), 8, 0.2)
    fresh, _ = build(backend, SETTINGS)
    assert ordinary(good, BATCH) == ordinary(fresh, BATCH)
