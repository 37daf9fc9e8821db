"""Gradients on their way: every raw local gradient, seen before it is added, averaged, clipped or repaired, also by a
hook that was there before; and which of them the loop reduced, in which order.

A hook finds the smallest and the largest element and waits for nothing; they are looked at together, just before the
update. On a GPU it leaves the gradient to be read with others, at the latest when the backward pass ends: before a
wrapper that reduces puts the sum in its place.

A hook takes the host longer than reading what it is given takes a device. Most loops leave in `grad` what came, until
the pass ends: DDP sums elsewhere until then. Where that was seen, all are read there at once, and only those parameters
keep a hook at which passes begin. The others get theirs back for good where anything turns out otherwise, and now and
then for a window, to see it again.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
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
_AGREED, _AGAIN = 2, 64
"""So many windows show that gradients are found in `grad`, and after so many it is looked at again."""


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


@dataclass
class _Pass:
    """A backward pass that has begun."""

    held: list[tuple[Tensor, int] | None]
    """What lay in `grad` of each parameter then, with its version; nothing where every gradient has a hook."""
    came: list[int] = field(default_factory=list)
    """The parameters whose gradient a hook has seen."""
    added: bool = False
    """Whether one of those was added to what lay there."""


class _FoundInGrad:
    """Whether the gradients of a pass are found in `grad` at its end as they came; looked at once a window."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self._extremes = Extremes(parameters)
        self._left = _AGREED
        self._never = False

    @property
    def shown(self) -> bool:
        """Whether it was seen to be so, and never otherwise."""
        return not (self._left or self._never)

    def never(self) -> None:
        """It is not so, whatever is seen."""
        self._never = True

    def again(self) -> None:
        """It is to be seen once more."""
        self._left = max(self._left, 1)

    def look(self, came: Sequence[int]) -> None:
        """A pass ends that gave these parameters, which had none, a gradient."""
        if self._never or self._extremes.any:
            return
        gradients = [gradient for index in came if (gradient := self._parameters[index].grad) is not None]
        hooked = any(_is_hooked(self._parameters[index], 1) for index in came)
        # A part of a larger memory, as DDP's views of its buckets are, may be reduced there before the pass ends.
        if not hooked and len(gradients) == len(came) and all(map(_is_alone, gradients)):
            self._extremes.add_all(came, gradients)

    def waiting(self) -> list[list[Tensor]]:
        """As `GradientHooks.waiting`."""
        return self._extremes.waiting() if self._extremes.any else []

    def judge(self, raw: Sequence[tuple[int, float, float]]) -> None:
        """Compare what was found with what the hooks had seen before."""
        if not self._extremes.any:
            return
        came: dict[int, tuple[float, float]] = {}
        for index, low, high in raw:
            came.setdefault(index, (low, high))  # of the first pass that gave it one
        found = self._extremes.read()
        self.clear()
        if all(low > -_INFINITE and high < _INFINITE for _, low, high in found):
            self._never |= any(came.get(index) != (low, high) for index, low, high in found)
            self._left = max(self._left - 1, 0)

    def clear(self) -> None:
        """Forget what was found in this window."""
        self._extremes.clear()


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
        self.at_end = False
        """Whether gradients are read in `grad` when their pass ends, and few parameters have a hook."""
        self._discarded = discarded
        self._shown = shown
        self._parameters = parameters
        self._count = len(parameters)
        self._seen = Extremes(parameters)
        self._passes: dict[int, _Pass] = {}
        """Those that have begun, by torch's number: one may run within another."""
        self._found_in_grad = _FoundInGrad(parameters)
        self._begin_at: set[int] = set()
        self._touched: set[int] = set()
        """The parameters whose gradients were read at the end of a pass."""
        self._left: list[_Left] = []
        self._timed, self._windows, self._timed_windows, self._timed_s = True, 1, 1, 0.0
        self._started = bytearray(self._count)
        self._handles: dict[int, RemovableHandle] = {}
        self._hook_all()

    def _hook_all(self) -> None:
        self.at_end = False
        for index, parameter in enumerate(self._parameters):
            if index not in self._handles:
                self._handles[index] = _hooked_first(parameter, self._hook(index, parameter))

    def _hook_few(self) -> None:
        self.at_end = True
        for index in self._handles.keys() - self._begin_at - {self._shown[0]}:
            self._handles.pop(index).remove()

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
            self.backward_seen = self.arrived = True
            number = torch._C._current_graph_task_id()
            if number not in self._passes:
                self._begin(number, index)
            if not self.at_end:
                self._take(index, gradient, self._passes.get(number))
            if show is not None:
                show(gradient)
            if timed:
                self._timed_s += time.perf_counter() - began

        return see

    def _begin(self, number: int, index: int) -> None:
        """A pass is seen for the first time, by the gradient of parameter `index`."""
        if self.at_end and any(_is_hooked(p, i in self._handles) for i, p in enumerate(self._parameters)):
            self._found_in_grad.never()
            self._hook_all()
        self._begin_at.add(index)
        begun = _Pass(self._lying() if self.at_end else [])
        self._passes[number] = begun
        # Told in the order of asking: a wrapper asks after it got a gradient, which this hook has before it.
        torch.autograd.Variable._execution_engine.queue_callback(partial(self._end, number, begun))

    def _lying(self) -> list[tuple[Tensor, int] | None]:
        """What lies in `grad` of each parameter, with its version, before a pass adds to it."""
        gradients = [parameter.grad for parameter in self._parameters]
        if any(gradients[index] is None for index in self._touched):
            self.discard()  # somebody threw the window away by hand
        if not self._seen.any:
            there = [(index, held) for index, held in enumerate(gradients) if held is not None]
            self._left += [
                _Left(index, held, held._version, *extremes(held)) for index, held in there if not self._started[index]
            ]
            self._seen.any = True
        return [None if held is None else (held, held._version) for held in gradients]

    def _take(self, index: int, gradient: Tensor, begun: _Pass | None) -> None:
        held = self._parameters[index].grad
        if not self._started[index]:
            self._started[index] = True
            if held is not None:
                self._left.append(_Left(index, held, held._version, *extremes(held)))
        elif held is None:
            self._forget(index)
        self._seen.add(index, gradient)
        if begun is not None:
            begun.came.append(index)
            begun.added |= held is not None

    def _end(self, number: int, begun: _Pass) -> None:
        """A pass ends; whoever reduces what it gave behind its end has not begun yet."""
        if self._passes.get(number) is not begun:
            return  # it was thrown away meanwhile
        del self._passes[number]
        began = time.perf_counter() if self._timed else 0.0
        if self.at_end and begun.held:
            found = [
                (index, now)
                for index, (parameter, held) in enumerate(zip(self._parameters, begun.held, strict=True))
                if (now := parameter.grad) is not None
                and (held is None or now is not held[0] or now._version != held[1])
            ]
            self._seen.add_all(*map(list, zip(*found, strict=True)) if found else ([], []))
            self._touched.update(index for index, _ in found)
        else:
            self._seen.flush()
            if not begun.added:
                self._found_in_grad.look(begun.came)
        if self._timed:
            self._timed_s += time.perf_counter() - began

    def reducing(self, gradient: bool) -> None:
        """The loop reduces a tensor; gradient: one that lies in `grad`, where it is not found as it came, then."""
        if gradient and self._passes:
            self._found_in_grad.never()
            self._hook_all()

    def spent(self, *, wait: bool) -> float:
        """Seconds in the hooks, those of every `_TIMED`th window, which stand for the others too; and of GPUs, which
        are waited for or not."""
        return self._timed_s * self._windows / self._timed_windows + self._seen.seconds(wait=wait)

    @property
    def started(self) -> bool:
        """Whether a backward pass of this window has reached a parameter."""
        return self._seen.any

    def _forget(self, index: int) -> None:
        # Somebody threw the window away by hand; with the first parameter that shows it, all of it goes.
        if self._seen.has(index):
            self.discard()
            self._started[index] = True

    def _clear(self) -> None:
        self._seen.clear()
        self._found_in_grad.clear()
        self._passes.clear()  # a pass that failed told nothing
        self._touched.clear()
        self._left.clear()
        self.backward_seen = False

    def discard(self) -> None:
        """The gradients so far were thrown away: what they showed is of no concern."""
        self._clear()
        self._started = bytearray(b"\x01" * self._count)
        self._discarded()

    def waiting(self) -> list[list[Tensor]]:
        """What devices have yet to say, in lists that may be brought to the CPU before `read`."""
        return [*self._seen.waiting(), *self._found_in_grad.waiting()]

    def read(self) -> Raw:
        """What the window showed. One wait for each device, unless that was brought."""
        seen = self._seen.read()
        self._found_in_grad.judge(seen)
        # A pass that began where none was seen to begin before has given what was not there.
        if self.at_end and any(p.grad is not None and i not in self._touched for i, p in enumerate(self._parameters)):
            self._found_in_grad.never()
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
        if self._windows % _AGAIN == 0:
            self._found_in_grad.again()
        if self._found_in_grad.shown:
            self._hook_few()
        else:
            self._hook_all()

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()


def _is_hooked(parameter: torch.nn.Parameter, ours: int) -> bool:
    """Whether what `parameter` gets may be changed on its way: it has more hooks than `ours`."""
    return len(parameter._backward_hooks or ()) > ours or bool(parameter._post_accumulate_grad_hooks)


def _is_alone(gradient: Tensor) -> bool:
    """Whether there is nothing else in its memory."""
    return gradient.layout == torch.strided and gradient.untyped_storage().nbytes() == gradient.nbytes


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

    def add(self, tensor: Tensor) -> bool:
        """`tensor` is about to be reduced. Whether it is the gradient of a member."""
        index = self._index(tensor)
        strided = tensor.layout == torch.strided and not tensor.is_contiguous()
        # A backend sums memory as it lies: permuted alike on all ranks it comes out right, with holes it does not.
        order = tensor.stride() if strided else ()
        self._calls.append((index, tuple(tensor.shape), order, str(tensor.dtype)))
        if index >= 0:
            self._next = index + 1
            if strided and not _is_dense(tensor):
                self.strided = index + 1
        return index >= 0

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
