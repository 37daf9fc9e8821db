"""Seven ids of the seed as decorators: with a decorator its fault is named on two real ranks, without it nothing is."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from andon.backend import devices
from andon.backend.base import Backend
from andon.backend.group import GroupBackend
from andon.coordinator import DataParallelCoordinator
from andon.step import pending
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

PHASES: Any = TrainingStep
Drive = Callable[[Backend], object]
Decorator = tuple[str, Law[Any]]


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

    def wrong() -> None:
        apply()
        FAULTS["weight flipped"].plant(own)

    own.apply = wrong  # type: ignore[method-assign]


def _nan_gradient(own: Replica) -> None:
    set_gradient = own.set_gradient

    def wrong(pieces: Any, divisor: int) -> None:
        set_gradient(pieces, divisor)
        own.master.gradient[0] = float("nan")

    own.set_gradient = wrong  # type: ignore[method-assign]


def _silent_fallback(backend: Backend) -> object:
    """A rank without GPUs that trains on the CPU and tells nobody."""
    chosen, placed, _ = devices.placement("nccl", 2, None, gpus=0, fallback=True)
    return ordinary(build(GroupBackend(chosen, placed[backend.ranks[0]]), SETTINGS)[0], SETTINGS.batches()[0])


def _one_update(backend: Backend) -> object:
    return ordinary(build(backend, SETTINGS)[0], SETTINGS.batches()[0])


@contextmanager
def _swapped(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def _without(*decorators: Decorator) -> Iterator[None]:
    """Inside, these phases lack the decorator that names the row."""
    changed = []
    for phase, row in decorators:
        checker = getattr(PHASES, phase).judge
        for conditions in (*checker.__preconditions__, checker.__postconditions__):
            odd = [each for each in conditions if row.id in each.condition.__name__.split(", ")]
            changed += [(conditions, list(conditions))] * bool(odd)
            conditions[:] = [each for each in conditions if each not in odd]
    assert len(changed) == len(decorators)
    try:
        yield
    finally:
        for conditions, before in changed:
            conditions[:] = before


def _silent(*_: object, **__: object) -> tuple[str, tuple[torch.device, ...], str]:
    return "gloo", (torch.device("cpu"),) * 2, ""


FAULTY: Mapping[str, tuple[Drive, tuple[Decorator, ...], str]] = {
    "C-DP-001": (
        _after_one_update(FAULTS["weight flipped"].plant),
        (("_reduce_gradient", laws.WEIGHTS_UNCHANGED), ("_apply_update", laws.REPLICAS)),
        "replicas-agree",
    ),
    "C-DP-002": (
        _after_one_update(FAULTS["micro-batch computed twice"].plant),
        (("_compute", EACH_ONCE),),
        "samples-once",
    ),
    "F-DP-001": (
        _after_one_update(_flipped_after_the_update),
        (("_apply_update", laws.REPLICAS),),
        "replicas-agree",
    ),
    "F-DP-002": (_after_one_update(FAULTS["other rows"].plant), (("_compute", ROWS_PLANNED),), "content-planned"),
    "F-DP-003": (_after_one_update(_nan_gradient, (0, 1)), (("_reduce_gradient", laws.FINITE),), "finite"),
    "F-DP-004": (_silent_fallback, (), "cpu-fallback"),
    "F-DP-005": (_one_update, (), "loss-equivalent"),
}
"""By id: the fault, the decorators that keep the promise, and the clause that must be named."""


def _clause(drive: Drive, backend: Backend) -> str:
    try:
        drive(backend)
    except Violation as violation:
        return violation.clause
    return ""


def found_by_this_rank() -> Mapping[str, tuple[str, str]]:
    """By id, the clause of the violation that its fault ends in with the decorators, and without them."""
    backend, found = GroupBackend("gloo", CPU), {}
    for name, (drive, decorators, _) in FAULTY.items():
        if name == "F-DP-004":
            with _swapped(devices.placement.__wrapped__, "__code__", _silent.__code__):  # type: ignore[attr-defined]
                guarded = _clause(drive, backend)
                with _swapped(devices, "placement", devices.placement.__wrapped__):  # type: ignore[attr-defined]
                    found[name] = guarded, _clause(drive, backend)
        elif name == "F-DP-005":
            with _swapped(pending, "fold", lambda node, leaf, *_: sum(map(leaf, range(node[1] // 2)))):
                guarded = _clause(drive, backend)
                with _swapped(pending, "mean_loss", pending.mean_loss.__wrapped__):  # type: ignore[attr-defined]
                    found[name] = guarded, _clause(drive, backend)
        else:
            guarded = _clause(drive, backend)
            with _without(*decorators):
                found[name] = guarded, _clause(drive, backend)
    return found


WANTED = {name: (clause, "") for name, (_, _, clause) in FAULTY.items()}


def test_a_fault_is_named_with_its_decorator_and_not_without() -> None:
    assert [outcome.get() for outcome in run_ranks(2, found_by_this_rank)] == [WANTED] * 2


_OPTIMIZED = """
import json
from tests.step.test_promises import found_by_this_rank
from tests.support.ranks import run_ranks
if __name__ == "__main__":
    assert False, "this runs with -O"
    print(json.dumps([outcome.get() for outcome in run_ranks(2, found_by_this_rank)]))
"""


def test_the_same_holds_with_assertions_off() -> None:
    done = subprocess.run([sys.executable, "-O", "-c", _OPTIMIZED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [{name: list(pair) for name, pair in WANTED.items()}] * 2


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
    with replicas(3) as coordinator:
        with pytest.raises(Violation) as caught:
            coordinator.train_batch_parallel(mixed_samples(4))
        clause = "samples-once" if fault == "a sample is lost" else "replicas-agree"
        assert (caught.value.clause, caught.value.rank) == (clause, None if clause == "samples-once" else 1)
        bare = DataParallelCoordinator.train_batch_parallel.__wrapped__  # type: ignore[attr-defined]
        bare(coordinator, mixed_samples(4))
