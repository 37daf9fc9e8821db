"""What a fault is, and the ways of planting one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import Any, Literal

import torch

from andon.step.plan import GlobalBatch
from andon.step.replica import PartialGradient, Replica
from andon.step.step import Pending, StepResult
from andon_falsify.subjects.assembly import Parts
from andon_falsify.subjects.case import Case

Plant = Callable[[Any, ExitStack], None]
"""Changes what the subject was assembled to (for `functions` nothing); the stack is for what has to be undone."""
Kind = Literal["trainer", "resume", "coordinator", "functions"]


@dataclass(frozen=True)
class Fault:
    """A wrong, the claim that must fall by it, and the case that shows it.

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
    original = getattr(thing, method)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return call(original, *args, **kwargs)

    object.__setattr__(thing, method, wrapped)


def patched(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set an attribute of a module or class until `stack` closes."""
    before = getattr(owner, name)
    stack.callback(setattr, owner, name, before)
    setattr(owner, name, value)


def of_function(name: str, claim: str, reason: str, function: Callable[..., Any], mutant: Callable[..., Any]) -> Fault:
    """A fault of a free function: it has the body of `mutant`."""
    return Fault(name, claim, reason, lambda _, stack: body_replaced(stack, function, mutant), kind="functions")


def body_replaced(stack: ExitStack, function: Callable[..., Any], mutant: Callable[..., Any]) -> None:
    """Give `function`, under all of its contracts, the body of `mutant` until `stack` closes.

    The mutant may use its own arguments, builtins, and what the function's module has. Raises `ValueError` where it
    closes over anything.
    """
    inner = inspect.unwrap(function)
    assert isinstance(inner, FunctionType)
    assert isinstance(mutant, FunctionType)
    if mutant.__code__.co_freevars:
        msg = f"{mutant.__name__} closes over {mutant.__code__.co_freevars}"
        raise ValueError(msg)
    patched(stack, inner, "__code__", mutant.__code__)


class Changed:
    """A thing of which some attributes are others; calls and all else go to the original."""

    def __init__(self, inner: Any, **attributes: Any) -> None:
        self._inner = inner
        self.__dict__.update(attributes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The attribute `call` where there is one."""
        return self.__dict__.get("call", self._inner)(*args, **kwargs)


@dataclass(frozen=True)
class _Reporting:
    """An update that was launched, and reports what `change` makes of its result."""

    inner: Pending
    change: Callable[[StepResult], StepResult]

    def result(self) -> StepResult:
        """See `Pending.result`."""
        return self.change(self.inner.result())


def around_updates(
    parts: Parts,
    begins: Callable[[GlobalBatch], object],
    change: Callable[[GlobalBatch, StepResult], StepResult],
) -> None:
    """Call begins(batch) before every update, and have it report change(batch, result): at once or a step later."""
    inner = parts.step

    def call(batch: GlobalBatch, *args: Any, **kwargs: Any) -> StepResult:
        begins(batch)
        return change(batch, inner(batch, *args, **kwargs))

    def launch(batch: GlobalBatch, *args: Any, **kwargs: Any) -> _Reporting:
        begins(batch)
        return _Reporting(inner.launch(batch, *args, **kwargs), partial(change, batch))

    parts.step = Changed(inner, call=call, launch=launch)  # type: ignore[assignment]


def with_result(parts: Parts, change: Callable[[StepResult], StepResult]) -> None:
    """Have every step report what `change` makes of its result."""
    around_updates(parts, lambda batch: None, lambda batch, result: change(result))


def with_plan(parts: Parts, change: Callable[[GlobalBatch], GlobalBatch], **attributes: Any) -> None:
    """Have the plan give what `change` makes of its batches."""
    inner = parts.plan

    def batch(step: int) -> GlobalBatch:
        return change(inner.batch(step))

    parts.plan = Changed(inner, batch=batch, **attributes)  # type: ignore[assignment]


def current_batch(parts: Parts) -> Callable[[], GlobalBatch]:
    """A function that says which batch is being trained on."""
    held: dict[str, GlobalBatch] = {}
    around_updates(parts, partial(held.__setitem__, "now"), lambda batch, result: result)
    return lambda: held["now"]


def followers(parts: Parts) -> Mapping[int, Replica]:
    """The replicas of this process but rank 0's."""
    return {rank: replica for rank, replica in parts.by_rank.items() if rank}


def after_updates(replicas: Iterable[Replica], change: Callable[[Replica], object]) -> None:
    """Have change(replica) behind every update of each of `replicas`."""
    for replica in replicas:

        def apply(inner: Callable[[], None], own: Replica = replica) -> None:
            inner()
            change(own)

        around(replica, "apply", apply)


def with_rate(parts: Parts, step_of: Callable[[int], int]) -> None:
    """Have each update at the rate of the update step_of(its number)."""
    schedule = parts.schedule
    parts.schedule = Changed(schedule, rate=lambda step: schedule.rate(step_of(step)))  # type: ignore[assignment]


def local_sum(replica: Replica, partial: PartialGradient) -> torch.Tensor:
    """What this replica alone has summed, [size]."""
    return sum(partial.roots.values(), torch.zeros_like(replica.parameters.gradient))


def unsynced(replica: Replica, keeps: Callable[[str], bool]) -> None:
    """The tensors whose names `keeps` accepts get this replica's own gradient instead of the reduced one."""
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


def scaled_partials(replica: Replica, factor: Callable[[PartialGradient], float]) -> None:
    """This replica's share of the sum is multiplied before it is handed over."""

    def gradients(inner: Callable[..., PartialGradient], *args: Any, **kwargs: Any) -> PartialGradient:
        partial = inner(*args, **kwargs)
        scale = factor(partial)
        for root in partial.roots.values():
            root.mul_(scale)
        return partial

    around(replica, "gradients", gradients)


def rows_of(partial: PartialGradient) -> int:
    """How many rows a replica's partial gradient is of."""
    return int(partial.reports[:, 1].sum()) if len(partial.reports) else 0
