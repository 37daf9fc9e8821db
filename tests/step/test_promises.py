"""Seven ids of the seed as decorators: with a decorator its fault is named on two real ranks, without it nothing is."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from andon.backend import devices
from andon.backend.base import Backend, GroupBackend
from andon.config.schema import Run
from andon.coordinator import DataParallelCoordinator
from andon.step import step as steps
from andon.step.message import EACH_ONCE, ROWS_PLANNED
from andon.step.replica import Replica
from andon.step.step import StepResult, TrainingStep
from andon_contracts.laws import update as laws
from andon_contracts.laws.law import Law
from andon_contracts.violation import Violation
from tests.seed.subject import mixed_samples, replicas
from tests.support.faults import CULPRIT, FAULTS, SETTINGS, ordinary
from tests.support.ranks import run_ranks
from tests.support.toy import CPU, build

Drive = Callable[[Backend], object]
Change = Callable[[pytest.MonkeyPatch], None]


def _after_one_update(plant: Callable[[Replica], None], on: tuple[int, ...] = (CULPRIT,)) -> Drive:
    def drive(backend: Backend) -> object:
        step, (own,) = build(backend, SETTINGS)
        step.attest_start({})
        first, second = SETTINGS.batches()[:2]
        ordinary(step, first)
        if backend.ranks[0] in on:
            plant(own)
        return ordinary(step, second)

    return drive


def _flipped_after_the_update(own: Replica) -> None:
    apply = own.apply
    own.apply = lambda: (apply(), FAULTS["weight flipped"].plant(own))[0]  # type: ignore[method-assign, func-returns-value]


def _nan_gradient(own: Replica) -> None:
    inner = own.set_gradient
    own.set_gradient = lambda *args: (inner(*args), own.master.gradient[:1].fill_(torch.nan))[0]  # type: ignore[method-assign]


def _placed_without_a_gpu(backend: Backend) -> object:
    chosen, placed, _ = devices.placement(Run(backend="nccl", workers=2, cpu_fallback=True), gpus=0)
    return ordinary(build(GroupBackend(chosen, placed[backend.ranks[0]]), SETTINGS)[0], SETTINGS.batches()[0])


def _silently(*_: object, **__: object) -> tuple[str, tuple[torch.device, ...], str]:
    return "gloo", (torch.device("cpu"),) * 2, ""


def _body(function: Any, body: Any) -> Change:
    return lambda patch: patch.setattr(function.__wrapped__, "__code__", body.__code__)


def _half_of_the_losses(node: tuple[int, int], leaf: Callable[[int], float], *_: object) -> float:
    return sum(map(leaf, range(node[1] // 2)))


def _without(*decorators: tuple[str, Law[Any]]) -> Change:

    def change(patch: pytest.MonkeyPatch) -> None:
        for phase, row in decorators:
            judge = getattr(TrainingStep, phase).judge
            others = [
                [each for each in conditions if row.id not in each.condition.__name__.split(", ")]
                for conditions in (*judge.__preconditions__, judge.__postconditions__)
            ]
            patch.setattr(judge, "__preconditions__", others[:-1])
            patch.setattr(judge, "__postconditions__", others[-1])

    return change


def _bare(module: Any, name: str) -> Change:
    return lambda patch: patch.setattr(module, name, getattr(module, name).__wrapped__)


def _as_it_is(_: pytest.MonkeyPatch) -> None:
    pass


BEFORE, AFTER = ("_reduce_gradient", laws.WEIGHTS_UNCHANGED), ("_apply_update", laws.REPLICAS)
FAULTY: Mapping[str, tuple[Drive, Change, Change, str]] = {
    "C-DP-001": (
        _after_one_update(FAULTS["weight flipped"].plant), _as_it_is, _without(BEFORE, AFTER), "replicas-agree"
    ),
    "C-DP-002": (
        _after_one_update(FAULTS["micro-batch computed twice"].plant), _as_it_is,
        _without(("_compute", EACH_ONCE)), "samples-once",
    ),
    "F-DP-001": (_after_one_update(_flipped_after_the_update), _as_it_is, _without(AFTER), "replicas-agree"),
    "F-DP-002": (
        _after_one_update(FAULTS["other rows"].plant), _as_it_is,
        _without(("_compute", ROWS_PLANNED)), "content-planned",
    ),
    "F-DP-003": (
        _after_one_update(_nan_gradient, (0, 1)), _as_it_is, _without(("_reduce_gradient", laws.FINITE)), "finite"
    ),
    "F-DP-004": (
        _placed_without_a_gpu, _body(devices.placement, _silently), _bare(devices, "placement"), "cpu-fallback"
    ),
    "F-DP-005": (
        _after_one_update(lambda own: None), lambda patch: patch.setattr(steps, "fold", _half_of_the_losses),
        _bare(steps, "mean_loss"), "loss-equivalent",
    ),
}  # fmt: skip
"""By id: a run with a fault, what else is planted, how the decorator is taken away, the clause that must be named."""
WANTED = {name: [clause, ""] for name, (*_, clause) in FAULTY.items()}


def _clause(drive: Drive, backend: Backend) -> str:
    try:
        drive(backend)
    except Violation as violation:
        return violation.clause
    return ""


def found_by_this_rank() -> Mapping[str, list[str]]:
    """By id, the clause of the violation that its fault ends in with the decorators, and without them."""
    backend, found = GroupBackend("gloo", CPU), {}
    for name, (drive, plant, undecorate, _) in FAULTY.items():
        with pytest.MonkeyPatch.context() as patch:
            plant(patch)
            found[name] = [_clause(drive, backend)]
            undecorate(patch)
            found[name].append(_clause(drive, backend))
    return found | {"__debug__": [str(__debug__)]}


def test_a_fault_is_named_with_its_decorator_and_not_without() -> None:
    found = [outcome.get() for outcome in run_ranks(2, found_by_this_rank)]
    assert found == [WANTED | {"__debug__": ["True"]}] * 2


_OPTIMIZED = """
import json
from tests.step.test_promises import found_by_this_rank
from tests.support.ranks import run_ranks
if __name__ == "__main__":
    print(json.dumps([outcome.get() for outcome in run_ranks(2, found_by_this_rank)]))
"""


def test_the_same_holds_under_python_o() -> None:
    done = subprocess.run([sys.executable, "-O", "-c", _OPTIMIZED], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [WANTED | {"__debug__": ["False"]}] * 2


@pytest.mark.parametrize("fault", ["states differ", "a sample is lost"])
def test_the_coordinator_keeps_its_own_promise(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """C-DP-002 on `train_batch_parallel`: all replicas are updated alike, with every sample."""
    inner = TrainingStep.__call__

    def wrong(self: TrainingStep, *args: Any) -> StepResult:
        result = inner(self, *args)
        if fault == "a sample is lost":
            return replace(result, rows=result.rows - 1)
        return replace(result, ranks=(result.ranks[0], {**result.ranks[1], "weights": 0}, *result.ranks[2:]))

    monkeypatch.setattr(TrainingStep, "__call__", wrong)
    coordinator = replicas(3)
    with pytest.raises(Violation) as caught:
        coordinator.train_batch_parallel(mixed_samples(4))
    clause, rank = ("samples-once", None) if fault == "a sample is lost" else ("replicas-agree", 1)
    assert (caught.value.clause, caught.value.rank) == (clause, rank)
    bare = DataParallelCoordinator.train_batch_parallel.__wrapped__  # type: ignore[attr-defined]
    bare(coordinator, mixed_samples(4))
