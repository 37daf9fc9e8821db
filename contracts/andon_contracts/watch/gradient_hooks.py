"""Gradients on their way: every raw local gradient, seen before it is added, averaged, clipped or repaired, also by a
hook that was there before; and which of them the loop reduced, in which order.

A hook finds the smallest and the largest element and waits for nothing; they are looked at together, just before the
update. On a GPU it leaves the gradient to be read with others, at the latest when the backward pass ends: before a
wrapper that reduces puts the sum in its place.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from andon_contracts.liveness.pending_collectives import PendingCollectives
from andon_contracts.observe import Extremes, extremes, numbers
from andon_contracts.watch.values import text_digest

_INFINITE = float("inf")
_TIMED = 8
"""The hooks of every so many-th window are timed: looking at the clock takes as long as much of what they do."""


@dataclass(frozen=True)
class Raw:
    """What one window of backward passes showed. Indices are those of the parameters, plus one; 0: none."""

    nonfinite: int
    stale: int
    extremes: Sequence[tuple[int, float, float]]
    """(parameter, smallest, largest element) of each gradient."""

    @property
    def sign(self) -> int:
        """One integer in [0, 2^62) that gradients of other rows have otherwise; 0 where all are zero."""
        return hash(tuple(sorted(self.extremes))) % (1 << 62) if self.nonzero else 0

    @property
    def touched(self) -> set[int]:
        """Parameters that got a gradient."""
        return {owner for owner, _, _ in self.extremes}

    @property
    def nonzero(self) -> set[int]:
        """Parameters that got one that is not all zero."""
        return {owner for owner, low, high in self.extremes if low != 0 or high != 0}


class Pulled(Protocol):
    """What says whether any rank pulled the cord, and is told of backward passes."""

    begun: PendingCollectives

    @property
    def cause(self) -> object | None:
        """Why; None where nobody did."""

    def heed(self) -> None:
        """Raise for it."""


@dataclass(frozen=True)
class _Left:
    """A gradient that was there when the first one of a window arrived, its version then, and its extremes."""

    index: int
    gradient: Tensor
    version: int
    low: Tensor
    high: Tensor

    def added_to(self, now: Tensor | None) -> bool:
        """Whether the new gradient was added to it. Nothing is where the loop only asks for one (`autograd.grad`).

        Torch adds in place; where it keeps a graph, the sum is another tensor, with that graph.
        """
        return self.gradient._version != self.version or (now is not None and now.requires_grad)


class GradientHooks:
    """The raw gradients of `parameters` since the last update of their optimizer."""

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        discarded: Callable[[], None],
        shown: tuple[int, Callable[[Tensor], None]],
    ) -> None:
        """discarded: called when a gradient turns out to have been set to None within a window.

        shown: the place of a parameter, and what is given each of its gradients.
        """
        self.muted = False
        self.cord: Pulled | None = None
        self.backward_seen = False
        self.arrived = False
        """Whether a gradient has come since this was last set to False."""
        self._discarded = discarded
        self._shown = shown
        self._parameters = parameters
        self._count = len(parameters)
        self._seen = Extremes(parameters)
        self._ends = False
        """Whether the end of the backward pass at hand is to be told."""
        self._on_gpu = any(parameter.is_cuda for parameter in parameters)
        self._left: list[_Left] = []
        self._timed, self._windows, self._timed_windows, self._timed_s = True, 1, 1, 0.0
        self._started = bytearray(self._count)
        self._handles = [_hooked_first(p, self._hook(index, p)) for index, p in enumerate(parameters)]

    def _hook(self, index: int, parameter: torch.nn.Parameter) -> Callable[[Tensor], None]:
        show = self._shown[1] if index == self._shown[0] else None

        def see(gradient: Tensor) -> None:
            if self.muted:
                return
            # The clock is no small part of what a hook costs, so some windows are timed for all.
            timed = self._timed
            began = time.perf_counter() if timed else 0.0
            cord = self.cord
            if cord is not None:
                if cord.cause is not None:
                    cord.heed()
                if cord.begun.armed:
                    cord.begun.backward(parameter)
            held = parameter.grad
            if not self._started[index]:
                self._started[index] = True
                if held is not None:
                    self._left.append(_Left(index, held, held._version, *extremes(held)))
            elif held is None:
                self._forget(index)
            self.backward_seen = self.arrived = True
            if self._on_gpu and not self._ends:
                self._ends = True
                # Told in the order of asking: a wrapper asks after it got a gradient, which this hook has before it.
                torch.autograd.Variable._execution_engine.queue_callback(self._pass_ends)
            self._seen.add(index, gradient)
            if show is not None:
                show(gradient)
            if timed:
                self._timed_s += time.perf_counter() - began

        return see

    def spent(self, *, wait: bool) -> float:
        """Seconds in the hooks, those of every `_TIMED`th window, which stand for the others too; and of GPUs, which
        are waited for or not."""
        return self._timed_s * self._windows / self._timed_windows + self._seen.seconds(wait=wait)

    @property
    def started(self) -> bool:
        """Whether a backward pass of this window has reached a parameter."""
        return self._seen.any

    def _pass_ends(self) -> None:
        self._ends = False
        self._seen.flush()

    def _forget(self, index: int) -> None:
        # Somebody threw the window away by hand; with the first parameter that shows it, all of it goes.
        if self._seen.has(index):
            self.discard()
            self._started[index] = True

    def _clear(self) -> None:
        self._seen.clear()
        self._ends = False  # a pass that failed told nothing
        self._left.clear()
        self.backward_seen = False

    def discard(self) -> None:
        """The gradients so far were thrown away: what they showed is of no concern."""
        self._clear()
        self._started = bytearray(b"\x01" * self._count)
        self._discarded()

    def waiting(self) -> list[list[Tensor]]:
        """What devices have yet to say, in lists that may be brought to the CPU before `read`."""
        return self._seen.waiting()

    def read(self) -> Raw:
        """What the window showed. One wait for each device, unless that was brought."""
        seen = self._seen.read()
        # Written so that NaN, with which no comparison holds, is bad.
        bad = [owner for owner, low, high in seen if not (low > -_INFINITE and high < _INFINITE)]
        return Raw(min(bad, default=-1) + 1, self._stale() + 1, seen)

    def _stale(self) -> int:
        """The first parameter whose gradient was not zero when the window began; -1: none."""
        left = [each for each in self._left if each.added_to(self._parameters[each.index].grad)]
        if not left:
            return -1
        lows, highs = numbers([each.low for each in left]), numbers([each.high for each in left])
        return min((each.index for each, low, high in zip(left, lows, highs, strict=True) if low or high), default=-1)

    def reset(self) -> None:
        """A new window begins: the optimizer has taken what there was."""
        self._clear()
        self._started = bytearray(self._count)
        self._windows += 1
        self._timed = self._windows % _TIMED == 1
        self._timed_windows += self._timed

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _hooked_first(parameter: torch.nn.Parameter, hook: Callable[[Tensor], None]) -> RemovableHandle:
    """Let `hook` see the gradients of `parameter` before the hooks that it has already, which may change them."""
    handle: RemovableHandle = parameter.register_hook(hook)  # type: ignore[no-untyped-call]
    hooks = parameter._backward_hooks
    if hooks is not None and len(hooks) > 1:
        # Torch calls them as they were put in; `OrderedDict.move_to_end` does not change that.
        before = [(key, each) for key, each in hooks.items() if key != handle.id]
        for key, each in before:
            del hooks[key]
            hooks[key] = each
    return handle


_NO_CALLS = text_digest([])


class Reductions:
    """The calls of one window. A tensor is known by its memory, looked up anew at each call: what an allocator gave
    out again is not mistaken for what was there before, so that all ranks of a right loop see the same calls.
    """

    def __init__(self, members: Sequence[torch.nn.Parameter]) -> None:
        self._members = members
        self._alike: dict[tuple[int, torch.dtype], list[int]] = defaultdict(list)
        for index, parameter in enumerate(members):
            self._alike[parameter.numel(), parameter.dtype].append(index)
        self._calls: list[tuple[object, ...]] = []
        self._next = 0
        self.strided = 0
        """The last member (index plus one) whose gradient was reduced although it has holes in memory; 0: none."""

    def add(self, tensor: Tensor) -> None:
        """`tensor` is about to be reduced."""
        index = self._index(tensor)
        strided = tensor.layout == torch.strided and not tensor.is_contiguous()
        # A backend sums memory as it lies: permuted alike on all ranks it comes out right, with holes it does not.
        order = tensor.stride() if strided else ()
        self._calls.append((index, tuple(tensor.shape), order, str(tensor.dtype)))
        if index >= 0:
            self._next = index + 1
            if strided and not _is_dense(tensor):
                self.strided = index + 1

    def _index(self, tensor: Tensor) -> int:
        """The member whose gradient `tensor` is, or lies in the memory of; -1 for any other tensor."""
        # Loops mostly go through the gradients in order.
        if self._next < len(self._members) and _is(tensor, self._members[self._next].grad):
            return self._next
        alike = self._alike.get((tensor.numel(), tensor.dtype), ())
        return next((index for index in alike if _is(tensor, self._members[index].grad)), -1)

    def digest(self) -> int:
        """What must be the same on all ranks."""
        return text_digest(self._calls) if self._calls else _NO_CALLS

    def clear(self) -> None:
        """Another window begins."""
        self._calls, self._next, self.strided = [], 0, 0


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill their memory without holes or overlap, in whatever order."""
    filled = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != filled:
                return False
            filled *= size
    return True


def _is(tensor: Tensor, gradient: Tensor | None) -> bool:
    if gradient is None or gradient.layout != tensor.layout:
        return False
    return tensor is gradient or (tensor.layout == torch.strided and tensor.data_ptr() == gradient.data_ptr() != 0)
