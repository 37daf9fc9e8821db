"""Updates that are judged late, as on GPUs: launched one ahead, read one behind, and nothing wrong is ever applied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch

from andon.backend.base import Backend, GroupBackend, InlineBackend
from andon.config.schema import Contracts, Optimizer
from andon.step.audit import NO_AUDIT
from andon.step.micro_batch import Task
from andon.step.replica import Replica
from andon.step.step import RankFailed, TrainingStep
from andon_contracts.policy import suspended
from andon_contracts.violation import Violation
from tests.step.test_audit import plant_in_gradient
from tests.support.faults import CULPRIT, FAULTS, SETTINGS, WORLD, PoisonedTask, cannot_read
from tests.support.ranks import run_ranks
from tests.support.toy import CPU, Settings, ToyTask, build, rate, record, replica, run

pytestmark = pytest.mark.xdist_group("step_late")
State = tuple[int, int, int]


def late_step(
    backend: Backend, settings: Settings = SETTINGS, task: Task | None = None, audit: Contracts = NO_AUDIT
) -> tuple[TrainingStep, list[Replica]]:
    replicas = [replica(optimizer=settings.optimizer, seed=settings.seed) for _ in backend.ranks]
    step = TrainingStep(
        backend, replicas, task or ToyTask(), settings.micro_batches, settings.clip_norm, audit, late=True
    )
    return step, replicas


def state(replicas: Sequence[Replica]) -> list[State]:
    return [(r.weights_digest(), r.optimizer_digest(), r.updates) for r in replicas]


def run_one_ahead(backend: Backend, settings: Settings) -> list[Mapping[str, object]]:
    step, replicas = late_step(backend, settings)
    step.attest_start({})
    results = []
    under_way = []
    for batch in settings.batches():
        under_way.append(step.launch(batch, rate(batch.step), batch.step))
        if len(under_way) > 1:
            results.append(under_way.pop(0).result())
    results.append(under_way.pop().result())
    return [record(result, replicas) for result in results]


def _without_state(records: Sequence[Mapping[str, object]]) -> list[Mapping[str, object]]:
    return [{name: value for name, value in each.items() if name != "state"} for each in records[:-1]] + [records[-1]]


LATE = {"m8": Settings(8, clip_norm=0.2), "m5": Settings(5), "m2": Settings(2, clip_norm=0.2)}


@pytest.mark.parametrize("name", LATE)
@pytest.mark.parametrize("world", [1, 3])
def test_late_is_the_same_to_the_bit(world: int, name: str) -> None:
    expected = _without_state(run(InlineBackend([CPU]), LATE[name]))
    assert _without_state(run_one_ahead(InlineBackend([CPU] * world), LATE[name])) == expected


def _caught(step: TrainingStep, replicas: Sequence[Replica]) -> tuple[Violation, list[list[State]]]:
    states = [state(replicas)]
    launched = []
    for batch in SETTINGS.batches()[1:]:
        launched.append(step.launch(batch, rate(batch.step), batch.step))
        states.append(state(replicas))
    with pytest.raises(Violation) as caught:
        launched[0].result()
    return caught.value, states


@pytest.fixture
def backend() -> Backend:
    return InlineBackend([CPU] * WORLD)


ONE_PER_CLAUSE = list({fault.clause: name for name, fault in FAULTS.items()}.values())


@pytest.mark.parametrize("name", ONE_PER_CLAUSE)
def test_a_fault_read_a_step_later_was_not_applied(name: str, backend: Backend) -> None:
    step, replicas = late_step(backend)
    step.attest_start({})
    first = SETTINGS.batches()[0]
    step(first, rate(1), 1)
    FAULTS[name].plant(replicas[CULPRIT])
    violation, states = _caught(step, replicas)
    fault = FAULTS[name]
    assert (violation.clause, violation.step, violation.finding.ranks) == (fault.clause, 2, (CULPRIT,))
    assert not fault.early or states[1] == states[0]
    assert states[2] == states[1]


Seen = tuple[str, int, tuple[int, ...], bool]
IN_PROCESSES = ("weight flipped", "other rows", "rate doubled")


def _ranks_with_faults() -> tuple[Mapping[str, Seen], str]:
    backend = GroupBackend("gloo", CPU)
    seen = {}
    for name in IN_PROCESSES:
        step, replicas = late_step(backend)
        step.attest_start({})
        step(SETTINGS.batches()[0], rate(1), 1)
        if CULPRIT in backend.ranks:
            FAULTS[name].plant(replicas[0])
        violation, states = _caught(step, replicas)
        seen[name] = (violation.clause, violation.step, violation.finding.ranks, states[2] == states[0])
    task = ToyTask()
    if CULPRIT in backend.ranks:
        task.load = cannot_read  # type: ignore[method-assign]
    step, replicas = late_step(backend, task=task)
    before = state(replicas)
    launched = step.launch(SETTINGS.batches()[0], rate(1), 1)
    assert state(replicas)[0][0] == before[0][0]
    try:
        launched.result()
    except (RankFailed, OSError) as error:
        return seen, type(error).__name__
    raise AssertionError("nothing was raised")


@pytest.fixture(scope="module")
def on_group() -> list[tuple[Mapping[str, Seen], str]]:
    return [outcome.get() for outcome in run_ranks(WORLD, _ranks_with_faults)]


def test_every_rank_reads_the_same_verdict(on_group: Sequence[tuple[Mapping[str, Seen], str]]) -> None:
    for seen, _ in on_group:
        assert seen == {name: (FAULTS[name].clause, 2, (CULPRIT,), True) for name in IN_PROCESSES}


def test_an_error_on_one_rank_is_read_by_all(on_group: Sequence[tuple[object, str]]) -> None:
    assert [error for _, error in on_group] == ["RankFailed", "OSError", "RankFailed"]


@pytest.mark.parametrize("where", ["loss", "gradient"])
@pytest.mark.parametrize("micro_batch", [0, 4, 7])
def test_a_nan_closes_the_gate(micro_batch: int, where: str, backend: Backend) -> None:
    rows = SETTINGS.batches()[1].micro_batches(8)[micro_batch]
    step, replicas = late_step(backend, task=PoisonedTask(rows[0], where))
    step(SETTINGS.batches()[0], rate(1), 1)
    violation, states = _caught(step, replicas)
    assert (violation.clause, violation.step) == ("finite", 2)
    assert violation.tensor == f"{where} of micro-batch {micro_batch}"
    assert states[0] == states[1] == states[2]


def test_an_audit_is_judged_late_too(backend: Backend) -> None:
    step, replicas = late_step(backend, audit=Contracts(audit_every=1, audit_coverage="all"))
    step(SETTINGS.batches()[0], rate(1), 1)
    plant_in_gradient(replicas[1], leaf=3, place=3, bit=12)
    violation, states = _caught(step, replicas)
    assert (violation.clause, violation.step) == ("audit", 2)
    assert states[0] == states[1] == states[2]


def test_updates_without_contracts_between_late_ones(backend: Backend) -> None:
    step, replicas = late_step(backend)
    first, second, third = SETTINGS.batches()
    launched = [step.launch(first, rate(1), 1)]
    with suspended():
        launched.append(step.launch(second, rate(2), 2))
    launched.append(step.launch(third, rate(3), 3))
    results = [each.result() for each in launched]
    assert [bool(result.digests) for result in results] == [True, False, True]
    plain, others = build(InlineBackend([CPU]), SETTINGS)
    losses = [plain(batch, rate(batch.step), batch.step).loss for batch in SETTINGS.batches()]
    assert [result.loss for result in results] == losses
    assert state(replicas)[0] == state(others)[0]


def test_after_a_violation_a_single_update_can_be_taken_again() -> None:
    backend = InlineBackend([CPU] * 2)
    batch = SETTINGS.batches()[0]
    task = PoisonedTask(batch.ids[0], "loss")
    step, replicas = late_step(backend, task=task)
    with pytest.raises(Violation):
        step(batch, rate(1), 1)
    task.row = -1
    fresh, _ = build(backend, SETTINGS)
    assert step(batch, rate(1), 1) == fresh(batch, rate(1), 1)
    assert replicas[0].updates == 1


def test_an_optimizer_that_its_device_cannot_hold_back_is_refused() -> None:
    backend = InlineBackend([CPU])
    with pytest.raises(ValueError, match="sgd on cpu is not fused"):
        late_step(backend, Settings(8, optimizer=Optimizer(name="sgd")))


def test_a_fused_sgd_is_held_back_and_counts_no_update() -> None:
    held = replica(optimizer=Optimizer(name="sgd"))
    held.optimizer = torch.optim.SGD([each.weights for each in held.master.ranges], lr=0.1, fused=True)
    held.parameters.gradient.fill_(1.0)
    closed = torch.ones(())
    held.gate(closed)
    before = held.weights_digest()
    held.apply()
    assert (held.weights_digest(), held.updates) == (before, 0)
    closed.zero_()
    held.apply()
    assert held.weights_digest() != before
    assert held.updates == 1
