"""Gradients on their way: every raw local gradient, seen before it is added, averaged, clipped or repaired, also by a
hook that was there before; and which of them the loop reduced, in which order.

A hook finds the smallest and the largest element and waits for nothing; they are looked at together, just before the
update. On a GPU it leaves the gradient to be read with others, at the latest when the backward pass ends: before a
wrapper that reduces puts the sum in its place.

A hook takes the host longer than reading what it is given takes a device. Most loops make one backward pass for an
update, over the same parameters each time, none of which has a gradient before; what each gets then lies in its `grad`
until the pass is over, for DDP sums elsewhere. Where two updates showed that, bit for bit, all gradients are read there
at once, and only the parameter keeps a hook whose gradient comes first. The others get theirs back before a pass that
is not like those, or behind one that was not; and now and then for an update, to see it again.

What is not seen so: a repair by a hook on autograd's own nodes, of which torch does not tell.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from andon_contracts.liveness.pending_collectives import PendingCollectives
from andon_contracts.observe import ORDINARY, Extremes, extremes, numbers
from andon_contracts.watch.values import text_digest

_INFINITE = float("inf")
_TIMED = 8
"""The hooks of every so many-th window are timed: looking at the clock takes as long as much of what they do."""
_AGREED, _AGAIN = 2, 64
"""So many windows in a row show that gradients are found in `grad`, and after so many it is looked at again."""
_NO_PASS = -1
"""The number of the pass that runs where none does."""


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
    """A backward pass that has begun, and what hooks have seen of it."""

    at_end: bool
    """Whether what it gives is read at its end."""
    came: dict[int, int] = field(default_factory=dict)
    """Where the memory of each gradient begins, by parameter, in the order of their coming."""
    plain: bool = True
    """Whether each came alone in memory of its own to a parameter that had none, and no other hook was told of it."""


class _FoundInGrad:
    """Whether the gradients of an update are those of one pass, and are found in `grad` at its end as they came."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self._extremes = Extremes(parameters)
        self._left = _AGREED
        self._never = False
        self._looked: tuple[int, ...] = ()
        self.first = -1
        """The parameter whose gradient comes first."""
        self.all: frozenset[int] = frozenset()
        """Those that get one."""

    @property
    def shown(self) -> bool:
        """Whether the last updates were like that, and none was otherwise."""
        return not (self._left or self._never)

    def never(self) -> None:
        """It is not so, whatever is seen."""
        self._never = True

    def again(self) -> None:
        """It is to be seen once more."""
        self._left = max(self._left, 1)

    def look(self, found: _Pass) -> None:
        """The first pass of an update ends."""
        if self._never or not found.plain:
            return
        gradients = [gradient for index in found.came if (gradient := self._parameters[index].grad) is not None]
        # As it came: not a copy, as in a bucket of DDP's, which may be reduced there before the pass ends.
        if len(gradients) == len(found.came) and [each.data_ptr() for each in gradients] == [*found.came.values()]:
            self._looked = tuple(found.came)
            self._extremes.add_all(self._looked, gradients)

    def waiting(self) -> list[list[Tensor]]:
        """As `GradientHooks.waiting`."""
        return self._extremes.waiting() if self._looked else []

    def judge(self, raw: Sequence[tuple[int, float, float]], *, one_pass: bool) -> None:
        """Compare what was found with all that hooks had seen in this update; one_pass: of one pass that was called."""
        looked, found = self._looked, self._extremes.read() if self._looked else []
        self.clear()
        if not (looked and one_pass):
            self._left = _AGREED
            return
        if not all(low > -_INFINITE and high < _INFINITE for _, low, high in found):
            return
        if sorted(found) != sorted(raw):
            self._never = True
        if (looked[0], frozenset(looked)) != (self.first, self.all):
            self.first, self.all, self._left = looked[0], frozenset(looked), _AGREED
        self._left = max(self._left - 1, 0)

    def clear(self) -> None:
        """Forget what was found in this window."""
        self._looked = ()
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
        self._called = 0
        """The loop's calls for a backward pass that gave a gradient, or may yet."""
        self._passes: dict[int, _Pass] = {}
        """Those of this window, by torch's number; one may run within another."""
        self._found_in_grad = _FoundInGrad(parameters)
        self._read_at_end: frozenset[int] = frozenset()
        self._left: list[_Left] = []
        self._timed, self._windows, self._timed_windows, self._timed_s = True, 1, 1, 0.0
        self._started = bytearray(self._count)
        self._handles: dict[int, RemovableHandle] = {}
        self._hook_all()

    def _hook_all(self) -> None:
        self.at_end = False
        for index, parameter in enumerate(self._parameters):
            if index not in self._handles and parameter.requires_grad:
                self._handles[index] = _hooked_first(parameter, self._hook(index, parameter))

    def _hook_few(self) -> None:
        self.at_end = True
        for index in self._handles.keys() - {self._found_in_grad.first, self._shown[0]}:
            self._handles.pop(index).remove()

    def _turn_back(self, *, begun: bool = True) -> None:
        """This update is not like those before; begun: a pass may have given gradients already."""
        self._found_in_grad.never()
        self._hook_all()
        if begun:  # they were not left over
            self._started = bytearray(b"\x01" * self._count)

    def called(self) -> None:
        """The loop calls for a backward pass, which has not begun."""
        began = time.perf_counter() if self._timed else 0.0
        self._called += 1
        if self.at_end and (self._called > 1 or not all(map(self._is_as_before, range(self._count)))):
            self._turn_back(begun=self._called > 1)
        if self._timed:
            self._timed_s += time.perf_counter() - began

    def _is_as_before(self, index: int) -> bool:
        parameter = self._parameters[index]
        return parameter.grad is None and not _is_hooked(parameter, ours=int(index in self._handles))

    def call_over(self) -> None:
        """That pass is over, or failed."""
        if self._passes:
            return
        if self.at_end and any(parameter.grad is not None for parameter in self._parameters):
            # It began where none did before: what it gave, reduced by now, is seen as it is.
            self.backward_seen = self.arrived = True
            self._add_present(range(self._count))
            self._turn_back()
        else:
            self._called -= 1  # a pass of other parameters than these

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
            held = parameter.grad
            if held is None and self._started[index] and not self.at_end:
                self._forget(index)
            number = torch._C._current_graph_task_id()
            if number not in self._passes:
                self._begin(number)
            if not self.at_end:
                self._take(index, gradient, held, self._passes[number])
            if show is not None:
                show(gradient)
            if timed:
                self._timed_s += time.perf_counter() - began

        return see

    def _begin(self, number: int) -> None:
        """A pass is seen for the first time."""
        if self.at_end and (self._passes or self._called != 1):
            self._turn_back()  # a second one, or one that nobody was heard to call for
        self._seen.any = True
        self._passes[number] = begun = _Pass(self.at_end)
        # Told in the order of asking: a wrapper asks after it got a gradient, which this hook has before it.
        torch.autograd.Variable._execution_engine.queue_callback(partial(self._end, number, begun))

    def _take(self, index: int, gradient: Tensor, held: Tensor | None, begun: _Pass) -> None:
        if not self._started[index]:
            self._started[index] = True
            if held is not None:
                self._left.append(_Left(index, held, held._version, *extremes(held)))
        self._seen.add(index, gradient)
        if begun.plain:
            begun.plain = held is None and _is_plain(gradient) and not _is_hooked(self._parameters[index], ours=1)
            begun.came[index] = gradient.data_ptr() if begun.plain else 0

    def _end(self, number: int, begun: _Pass) -> None:
        """A pass ends; whoever reduces what it gave behind its end has not begun yet."""
        if self._passes.get(number) is not begun:
            return  # it was thrown away meanwhile
        began = time.perf_counter() if self._timed else 0.0
        if begun.at_end:
            self._read_at_end = self._add_present(range(self._count))
            self._count_pass()
        else:
            self._seen.flush()
            if len(self._passes) == 1:
                self._found_in_grad.look(begun)
        if self._timed:
            self._timed_s += time.perf_counter() - began

    def _count_pass(self) -> None:
        """Count a pass that reduces, where no parameter with a hook is reduced; what it reduces is waited for later."""
        for index in self._read_at_end:
            if self.cord is None or not self.cord.begun.armed:
                return
            self.cord.begun.backward(self._parameters[index])

    def _add_present(self, indices: Iterable[int]) -> frozenset[int]:
        """See what lies in `grad` of those of `indices` that have one."""
        there = [(index, gradient) for index in indices if (gradient := self._parameters[index].grad) is not None]
        self._seen.add_all([index for index, _ in there], [gradient for _, gradient in there])
        return frozenset(index for index, _ in there)

    def reducing(self, gradient: bool) -> None:
        """The loop reduces a tensor; gradient: one that lies in `grad`. Within a pass: then it is not as it came."""
        if gradient and torch._C._current_graph_task_id() != _NO_PASS:
            self._turn_back()

    def spent(self) -> float:
        """Seconds of the host in the hooks, estimated from those of every `_TIMED`th window."""
        return self._timed_s * self._windows / self._timed_windows

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
        self._called = 0
        self._passes.clear()
        self._read_at_end = frozenset()
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
        if self.at_end and self._read_at_end != self._found_in_grad.all:
            # Of others than before: what was not seen on its way, reduced by now, is seen as it is.
            self._found_in_grad.never()
            self._add_present(index for index in range(self._count) if index not in self._read_at_end)
        seen = self._seen.read()
        if not self.at_end:
            self._found_in_grad.judge(seen, one_pass=self._called == len(self._passes) == 1)
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


def _is_hooked(parameter: torch.nn.Parameter, *, ours: int) -> bool:
    """Whether what `parameter` gets may be changed on its way: it has more hooks than `ours`."""
    return len(parameter._backward_hooks or ()) > ours or bool(parameter._post_accumulate_grad_hooks)


def _is_plain(gradient: Tensor) -> bool:
    """Whether it is what it holds, and there is nothing else in its memory."""
    plain = type(gradient) in ORDINARY and gradient.layout == torch.strided
    return plain and gradient.untyped_storage().nbytes() == gradient.nbytes


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
