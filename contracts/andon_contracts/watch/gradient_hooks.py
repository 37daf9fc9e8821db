"""The raw gradients of a loop, read before anything averages, clips or repairs them, and the reductions of that loop.

A repair by a hook on one of autograd's own nodes is not seen: torch lists those hooks nowhere.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from andon_contracts.liveness.halt import HaltSignal
from andon_contracts.observe import DENSE_TYPES, Extremes, extremes, to_floats
from andon_contracts.watch.values import text_digest

_INFINITE = float("inf")
_TIMED = 8
"""The hooks of every so many-th window are timed: looking at the clock takes as long as much of what they do."""
_AGREED, _RECHECK = 2, 64
"""Hooks are thinned out after two windows in a row that allow it. Every 64th window has all hooks again."""


@dataclass(frozen=True)
class Raw:
    """What one window of backward passes showed. extremes: (parameter, smallest, largest element) of each gradient.

    nonfinite, stale: index plus one of the first parameter whose gradient is not finite, or was not zero when the
    window began; 0: none.
    """

    nonfinite: int
    stale: int
    extremes: Sequence[tuple[int, float, float]]

    @property
    def sign(self) -> int:
        """An integer in [0, 2^62) that other rows' gradients do not share; 0 if all are zero."""
        return hash(tuple(sorted(self.extremes))) % (1 << 62) if self.nonzero else 0

    @property
    def touched(self) -> set[int]:
        """The parameters that received a gradient."""
        return {owner for owner, _, _ in self.extremes}

    @property
    def nonzero(self) -> set[int]:
        """The parameters that received a gradient with a nonzero element."""
        return {owner for owner, low, high in self.extremes if low != 0 or high != 0}


@dataclass
class _Pass:
    """A backward pass that has begun. came: the address of each gradient by parameter, in order of arrival. plain: each
    parameter had no gradient and no other hook, and received a gradient that fills its storage.
    """

    at_end: bool
    came: dict[int, int] = field(default_factory=dict)
    plain: bool = True


class _FoundInGrad:
    """Learns whether all gradients of an update come from one pass and are in `.grad` at its end as they came.

    first: the parameter whose gradient comes first. all: the parameters that receive a gradient.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self._extremes = Extremes(parameters)
        self.windows_left = _AGREED
        self.disabled = False
        self._read: tuple[int, ...] = ()
        self.first = -1
        self.all: frozenset[int] = frozenset()

    def disable(self) -> None:
        self.disabled = True

    def recheck(self) -> None:
        self.windows_left = max(self.windows_left, 1)

    def read(self, ended: _Pass) -> None:
        """Read `.grad` when the first pass of an update ends, after all parameters had a hook in it."""
        if self.disabled or not ended.plain:
            return
        gradients = [gradient for index in ended.came if (gradient := self._parameters[index].grad) is not None]
        # A copy does not count: it may lie in a bucket of DDP's, which may be reduced there before the pass ends.
        if [each.data_ptr() for each in gradients] == [*ended.came.values()]:
            self._read = tuple(ended.came)
            self._extremes.add_all(self._read, gradients)

    def waiting(self) -> list[list[Tensor]]:
        return self._extremes.device_results() if self._read else []

    def judge(self, raw: Sequence[tuple[int, float, float]], *, one_pass: bool) -> None:
        """Compare with what the hooks saw in this update. one_pass: it was one pass, and the loop called for it."""
        read, found = self._read, self._extremes.read() if self._read else []
        self.clear()
        if not (read and one_pass):
            self.windows_left = _AGREED
            return
        if not all(low > -_INFINITE and high < _INFINITE for _, low, high in found):
            return
        if sorted(found) != sorted(raw):
            self.disabled = True
        if (read[0], frozenset(read)) != (self.first, self.all):
            self.first, self.all, self.windows_left = read[0], frozenset(read), _AGREED
        self.windows_left = max(self.windows_left - 1, 0)

    def clear(self) -> None:
        self._read = ()
        self._extremes.clear()


class GradientHooks:
    """The raw gradients of `parameters` since the last update of their optimizer.

    A hook computes the smallest and the largest element and waits for no device. On a GPU many gradients are read at
    once, at the latest when the pass ends: before a wrapper puts its sum in their place.

    Per-parameter hooks cost more host time than reading the gradients costs a GPU, so they are thinned out. In most
    loops an update is one backward pass over the same parameters, each of which starts it with `.grad` None, and DDP
    reduces in buckets of its own: the raw gradient stays in `.grad` until the pass ends. After two updates in which
    that held bit for bit, only the parameter whose gradient arrives first keeps a hook.

    The invariant of thinned hooks (`at_end`): when a pass ends, `.grad` is what a hook on every parameter would have
    received. All hooks return, for good, when an update is not like those two: a second pass, or a gradient or another
    hook is there before a pass (`called`); a pass within a pass, or one that the loop did not call for (`see`); a
    reduction within a pass (`reducing`); a pass that no hook saw (`call_over`); gradients of other parameters (`read`).
    The last two are known after the fact, and gradients are read as they are then. Every 64th window has all hooks and
    compares both ways. If the invariant breaks, a watch takes a sum or a repaired gradient for what the rank computed:
    a repaired NaN, or rows that two ranks share, stay unseen.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        discarded: Callable[[], None],
        shown: tuple[int, Callable[[Tensor], None]],
    ) -> None:
        """discarded: called when the loop set a gradient to None within a window. shown: the index of a parameter, and
        a function that receives each of its gradients.
        """
        self.muted = False
        self.halt: HaltSignal | None = None
        self.backward_seen = False
        self.arrived = False
        """Whether a gradient has come since this was last set to False."""
        self.at_end = False
        """True while hooks are thinned out and `.grad` is read when a pass ends."""
        self._discarded = discarded
        self._shown = shown
        self._parameters = parameters
        self._seen = Extremes(parameters)
        self._called = 0
        """The loop's calls for a backward pass that gave a gradient, or may yet."""
        self._passes: dict[int, _Pass] = {}
        """The passes of this window by torch's number; one may run within another."""
        self._found_in_grad = _FoundInGrad(parameters)
        self._read_at_end: frozenset[int] = frozenset()
        self._left: list[tuple[int, Tensor, int, Tensor, Tensor]] = []
        """Gradients from before the window: parameter, gradient, and its version and extremes when the window began."""
        self._timed, self._windows, self._timed_windows, self._timed_s = True, 1, 1, 0.0
        self._started = bytearray(len(parameters))
        self._handles: dict[int, RemovableHandle] = {}
        self._hook_all()

    def _hook_all(self) -> None:
        self.at_end = False
        for index, parameter in enumerate(self._parameters):
            if index not in self._handles and parameter.requires_grad:
                self._handles[index] = _hooked_first(parameter, self._hook(index, parameter))

    def _restore_all_hooks(self, *, begun: bool = True) -> None:
        self._found_in_grad.disable()
        self._hook_all()
        if begun:  # gradients that are there may be of this window, and not left over from before it
            self._started = bytearray(b"\x01" * len(self._parameters))

    def called(self) -> None:
        """The loop calls for a backward pass, which has not begun."""
        began = time.perf_counter() if self._timed else 0.0
        self._called += 1
        if self.at_end:
            as_before = self._called == 1 and all(
                parameter.grad is None and not _is_hooked(parameter, ours=int(index in self._handles))
                for index, parameter in enumerate(self._parameters)
            )
            if not as_before:
                self._restore_all_hooks(begun=self._called > 1)
        if self._timed:
            self._timed_s += time.perf_counter() - began

    def call_over(self) -> None:
        """The pass that the loop called for is over, or failed."""
        if self._passes:
            return
        if self.at_end and any(parameter.grad is not None for parameter in self._parameters):
            self.backward_seen = self.arrived = True
            self._add_present()
            self._restore_all_hooks()
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
            halt = self.halt
            if halt is not None:
                if halt.cause is not None:
                    halt.raise_if_halted()
                if halt.pending.armed:
                    halt.pending.backward(parameter)
            self.backward_seen = self.arrived = True
            held = parameter.grad
            if held is None and self._started[index] and not self.at_end and index in self._seen.added:
                self.discard()  # the loop set gradients to None: with the first parameter that shows it, all go
            number = torch._C._current_graph_task_id()
            ours = self._passes.get(number)
            if ours is None:
                if self.at_end and (self._passes or self._called != 1):
                    self._restore_all_hooks()
                self._passes[number] = ours = _Pass(self.at_end)
                # Torch runs these callbacks in order: a wrapper queues its own after it received a gradient, which
                # this hook receives before it.
                torch.autograd.Variable._execution_engine.queue_callback(partial(self._end, number, ours))
            if not self.at_end:
                if not self._started[index]:
                    self._started[index] = True
                    if held is not None:
                        self._left.append((index, held, held._version, *extremes(held)))
                self._seen.add(index, gradient)
                if ours.plain:
                    ours.plain = held is None and _is_plain(gradient) and not _is_hooked(parameter, ours=1)
                    ours.came[index] = gradient.data_ptr() if ours.plain else 0
            if show is not None:
                show(gradient)
            if timed:
                self._timed_s += time.perf_counter() - began

        return see

    def _end(self, number: int, ended: _Pass) -> None:
        """A pass ends. A wrapper that reduces when the pass ends has not begun yet."""
        if self._passes.get(number) is not ended:
            return  # the loop threw the window away meanwhile
        began = time.perf_counter() if self._timed else 0.0
        if ended.at_end:
            self._read_at_end = self._add_present()
            for index in self._read_at_end:  # the pass counts as reducing although few parameters have a hook
                if self.halt is None or not self.halt.pending.armed:
                    break
                self.halt.pending.backward(self._parameters[index])
        else:
            self._seen.flush()
            if len(self._passes) == 1:
                self._found_in_grad.read(ended)
        if self._timed:
            self._timed_s += time.perf_counter() - began

    def _add_present(self, known: frozenset[int] = frozenset()) -> frozenset[int]:
        """Read each `.grad` as it is now, but those of `known`. Returns the parameters that were read."""
        there = {i: p.grad for i, p in enumerate(self._parameters) if p.grad is not None and i not in known}
        self._seen.add_all(list(there), list(there.values()))
        return frozenset(there)

    def reducing(self, gradient: bool) -> None:
        """The loop reduces a tensor. gradient: it is the `.grad` of a parameter."""
        if gradient and torch._C._current_graph_task_id() != -1:  # within a backward pass
            self._restore_all_hooks()

    def spent(self) -> float:
        """Seconds of the host in the hooks, estimated from those of every `_TIMED`th window."""
        return self._timed_s * self._windows / self._timed_windows

    @property
    def started(self) -> bool:
        """Whether a backward pass of this window has reached a parameter."""
        return bool(self._passes or self._seen.added)

    def _clear(self) -> None:
        self._seen.clear()
        self._found_in_grad.clear()
        self._called = 0
        self._passes.clear()
        self._read_at_end = frozenset()
        self._left.clear()
        self.backward_seen = False

    def discard(self) -> None:
        """Forget the gradients of this window: the loop threw them away."""
        self._clear()
        self._started = bytearray(b"\x01" * len(self._parameters))
        self._discarded()

    def waiting(self) -> list[list[Tensor]]:
        """Results that are still on devices, in lists that may be brought to the CPU before `read`."""
        return [*self._seen.device_results(), *self._found_in_grad.waiting()]

    def read(self) -> Raw:
        """What the window showed. Waits once for each device, unless `waiting` was brought before."""
        if self.at_end and self._read_at_end != self._found_in_grad.all:
            self._found_in_grad.disable()
            self._add_present(self._read_at_end)
        seen = self._seen.read()
        if not self.at_end:
            self._found_in_grad.judge(seen, one_pass=self._called == len(self._passes) == 1)
        # Written so that NaN, with which no comparison holds, is bad.
        bad = [owner for owner, low, high in seen if not (low > -_INFINITE and high < _INFINITE)]
        added: list[tuple[int, Tensor, Tensor]] = []
        for index, gradient, version, low, high in self._left:
            # A backward pass adds in place, or puts a sum with a graph there. `autograd.grad` does neither.
            now = self._parameters[index].grad
            if gradient._version != version or (now is not None and now.requires_grad):
                added.append((index, low, high))
        lows, highs = to_floats([low for _, low, _ in added]), to_floats([high for _, _, high in added])
        stale = [index for (index, _, _), low, high in zip(added, lows, highs, strict=True) if low or high]
        return Raw(min(bad, default=-1) + 1, min(stale, default=-1) + 1, seen)

    def reset(self) -> None:
        """A new window begins: the optimizer has used the gradients."""
        self._clear()
        self._started = bytearray(len(self._parameters))
        self._windows += 1
        self._timed = self._windows % _TIMED == 1
        self._timed_windows += self._timed
        if self._windows % _RECHECK == 0:
            self._found_in_grad.recheck()
        if self._found_in_grad.windows_left or self._found_in_grad.disabled:
            self._hook_all()
        else:
            self.at_end = True
            for index in self._handles.keys() - {self._found_in_grad.first, self._shown[0]}:
                self._handles.pop(index).remove()

    def close(self) -> None:
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()


def _is_hooked(parameter: torch.nn.Parameter, *, ours: int) -> bool:
    """Whether other hooks than `ours` may change the gradient of `parameter`."""
    return len(parameter._backward_hooks or ()) > ours or bool(parameter._post_accumulate_grad_hooks)


def _is_plain(gradient: Tensor) -> bool:
    """True for an ordinary dense tensor that fills its storage."""
    plain = type(gradient) in DENSE_TYPES and gradient.layout == torch.strided
    return plain and gradient.untyped_storage().nbytes() == gradient.nbytes


def _hooked_first(parameter: torch.nn.Parameter, hook: Callable[[Tensor], None]) -> RemovableHandle:
    """Let `hook` receive gradients before the hooks that `parameter` has already, which may change them."""
    handle: RemovableHandle = parameter.register_hook(hook)  # type: ignore[no-untyped-call]
    hooks = parameter._backward_hooks or {}
    # Torch calls them in the order of insertion, which `OrderedDict.move_to_end` does not change.
    for key in [key for key in hooks if key != handle.id]:
        hooks[key] = hooks.pop(key)
    return handle


class Reductions:
    """The loop's reductions in one window. A tensor is identified by its memory, looked up anew at each call: memory
    that an allocator gave out again is not mistaken, and all ranks of a right loop record the same calls. strided: the
    last member (index plus one) that was reduced although its gradient has holes in memory; 0: none.
    """

    def __init__(self, members: Sequence[torch.nn.Parameter]) -> None:
        self._members = members
        self._alike: dict[tuple[int, torch.dtype], list[int]] = defaultdict(list)
        for index, parameter in enumerate(members):
            self._alike[parameter.numel(), parameter.dtype].append(index)
        self.clear()

    def clear(self) -> None:
        self._calls: list[tuple[object, ...]] = []
        self._next, self.strided = 0, 0

    def add(self, tensor: Tensor) -> bool:
        """The loop is about to reduce `tensor`. Returns whether it is the gradient of a member."""
        # Loops mostly reduce the gradients in order.
        if self._next < len(self._members) and _is(tensor, self._members[self._next].grad):
            index = self._next
        else:
            alike = self._alike.get((tensor.numel(), tensor.dtype), ())
            index = next((index for index in alike if _is(tensor, self._members[index].grad)), -1)
        strided = tensor.layout == torch.strided and not tensor.is_contiguous()
        # A backend sums raw memory. The sum is right if all ranks have the same permutation, but not with holes.
        order = tensor.stride() if strided else ()
        self._calls.append((index, tuple(tensor.shape), order, str(tensor.dtype)))
        if index >= 0:
            self._next = index + 1
            if strided and not _is_dense(tensor):
                self.strided = index + 1
        return index >= 0

    def digest(self) -> int:
        """The digest of the calls, which must be equal on all ranks."""
        return text_digest(self._calls)


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
