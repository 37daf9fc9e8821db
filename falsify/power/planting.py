"""What a fault is, and how to plant it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch

from andon.step.plan import GlobalBatch
from andon.step.replica import PartialGradient, Replica
from andon.step.step import StepResult
from andon_falsify.subjects.assembly import TrainerUnderTest
from andon_falsify.subjects.case import Case
from andon_falsify.subjects.watching import Proxy

Plant = Callable[[Any, ExitStack], None]
"""Changes a subject before it trains. The stack undoes what does not belong to this subject alone."""
Kind = Literal["trainer", "resume", "coordinator"]


@dataclass(frozen=True)
class Fault:
    """A mistake, the claim that it must falsify, and the case that shows it.

    reason: a regular expression that the text of a counterexample must match. plant: runs in every process of the run.
    """

    name: str
    claim: str
    reason: str
    plant: Plant
    case: Case = field(default_factory=Case)
    kind: Kind = "trainer"


def around(thing: Any, method: str, call: Callable[..., Any]) -> None:
    """Replace the bound `method` of `thing` by call(original, *args, **kwargs)."""
    object.__setattr__(thing, method, partial(call, getattr(thing, method)))


def patched(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set an attribute of a module or class until `stack` closes."""
    before = getattr(owner, name)
    stack.callback(setattr, owner, name, before)
    setattr(owner, name, value)


def around_updates(
    parts: TrainerUnderTest,
    begins: Callable[[GlobalBatch], object],
    change: Callable[[GlobalBatch, StepResult], StepResult],
) -> None:
    """Call begins(batch) before every update, and make it report change(batch, result), at once or a step later."""
    inner = parts.step

    def call(batch: GlobalBatch, *args: Any, **kwargs: Any) -> StepResult:
        begins(batch)
        return change(batch, inner(batch, *args, **kwargs))

    def launch(batch: GlobalBatch, *args: Any, **kwargs: Any) -> Proxy:
        begins(batch)
        pending = inner.launch(batch, *args, **kwargs)
        return Proxy(pending, result=lambda: change(batch, pending.result()))

    parts.step = Proxy(inner, call=call, launch=launch)  # type: ignore[assignment]


def with_result(change: Callable[[StepResult], StepResult]) -> Plant:
    """Every step reports what `change` makes of its result."""
    return lambda parts, _: around_updates(parts, lambda batch: None, lambda batch, result: change(result))


def current_batch(parts: TrainerUnderTest) -> Callable[[], GlobalBatch]:
    """A function that returns the batch that is computed now."""
    held: dict[str, GlobalBatch] = {}
    around_updates(parts, partial(held.__setitem__, "now"), lambda batch, result: result)
    return lambda: held["now"]


def on_replicas(change: Callable[[Replica], object], first: int = 0) -> Plant:
    """Apply `change` to the replica of each rank from `first` on."""

    def plant(parts: TrainerUnderTest, _: ExitStack) -> None:
        for rank, replica in parts.by_rank.items():
            if rank >= first:
                change(replica)

    return plant


def around_each(method: str, call: Callable[..., Any], first: int = 0) -> Plant:
    """call(original, *args, **kwargs) replaces `method` of the replica of each rank from `first` on."""
    return on_replicas(lambda replica: around(replica, method, call), first)


def after_updates(change: Callable[[Replica], object], first: int = 0) -> Plant:
    """Apply `change` to the replica after every update, on each rank from `first` on."""

    def hook(replica: Replica) -> None:
        def apply(inner: Callable[[], None]) -> None:
            inner()
            change(replica)

        around(replica, "apply", apply)

    return on_replicas(hook, first)


def with_rate(step_of: Callable[[TrainerUnderTest, int], int]) -> Plant:
    """Update n has the learning rate of update step_of(parts, n)."""

    def plant(parts: TrainerUnderTest, _: ExitStack) -> None:
        rate = parts.schedule.rate
        parts.schedule = Proxy(parts.schedule, rate=lambda step: rate(step_of(parts, step)))  # type: ignore[assignment]

    return plant


def local_sum(replica: Replica, partial: PartialGradient) -> torch.Tensor:
    """The sum of this replica's micro-batches alone, [size]."""
    return sum(partial.roots.values(), torch.zeros_like(replica.parameters.gradient))


def unsynced(keeps: Callable[[str], bool] = lambda name: True, first: int = 1) -> Plant:
    """The ranks from `first` on keep their own gradient of the tensors whose names `keeps` accepts."""

    def hook(replica: Replica) -> None:
        own: list[torch.Tensor] = []

        def gradients(inner: Callable[..., PartialGradient], *args: Any, **kwargs: Any) -> PartialGradient:
            partial = inner(*args, **kwargs)
            own[:] = [local_sum(replica, partial)]
            return partial

        def set_gradient(inner: Callable[..., None], pieces: Any, divisor: int) -> None:
            inner(pieces, divisor)
            mine = replica.parameters.views(own[0] / divisor)
            for name, view in replica.reduced_gradient().items():
                if keeps(name):
                    view.copy_(mine[name])

        around(replica, "gradients", gradients)
        around(replica, "set_gradient", set_gradient)

    return on_replicas(hook, first)


def scaled_partials(replica: Replica, factor: Callable[[PartialGradient], float]) -> None:
    """Multiply this replica's partial gradient by factor(partial) before the reduction."""

    def gradients(inner: Callable[..., PartialGradient], *args: Any, **kwargs: Any) -> PartialGradient:
        partial = inner(*args, **kwargs)
        scale = factor(partial)
        for root in partial.roots.values():
            root.mul_(scale)
        return partial

    around(replica, "gradients", gradients)


def rows_of(partial: PartialGradient) -> int:
    """The number of rows in a replica's partial gradient."""
    return int(partial.reports[:, 1].sum()) if len(partial.reports) else 0
