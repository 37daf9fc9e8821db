"""The raw gradients of a loop, read before they are averaged, clipped or repaired, and the reductions of that loop.

It does not see repairs by a hook on an autograd node, because torch does not list those hooks.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from andon_contracts.liveness.halt import HaltSignal
from andon_contracts.observe import Extremes, extremes, has_other_hooks, is_dense, to_floats

_INFINITE = float("inf")
_AGREED, _RECHECK = 2, 64
"""Hooks are thinned out after two windows in a row that allow it. Every 64th window has all hooks again."""


@dataclass(frozen=True)
class RawSummary:
    """The raw gradients of one window. extremes: (parameter index, smallest, largest element) of each gradient.

    nonfinite, stale: index + 1 of the first parameter whose gradient is not finite, or that had a nonzero gradient when
    the window began and added to it; 0 for none.
    """

    nonfinite: int
    stale: int
    extremes: Sequence[tuple[int, float, float]]

    @property
    def fingerprint(self) -> int:
        """An integer in [0, 2^62) that differs for gradients of different rows; 0 if all gradients are zero."""
        return hash(tuple(sorted(self.extremes))) % (1 << 62) if self.nonzero else 0

    @property
    def received(self) -> set[int]:
        return {owner for owner, _, _ in self.extremes}

    @property
    def nonzero(self) -> set[int]:
        return {owner for owner, low, high in self.extremes if low != 0 or high != 0}


@dataclass
class _BackwardPass:
    """addresses: by parameter index, the address of its gradient, in order of arrival. plain: each parameter had no
    gradient and no other hook before, and received a gradient that fills its storage.
    """

    reads_at_end: bool
    addresses: dict[int, int] = field(default_factory=dict)
    plain: bool = True


class _EndReader:
    """Learns whether all gradients of an update come from one pass and stay unchanged in `.grad` until it ends.

    first: the parameter whose gradient arrives first. all: the parameters that receive a gradient.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self.extremes = Extremes(parameters)
        self.windows_left = _AGREED
        self.disabled = False
        self._read: tuple[int, ...] = ()
        self.first = -1
        self.all: frozenset[int] = frozenset()

    def read(self, ended: _BackwardPass) -> None:
        """Read `.grad`. Called when the first pass of an update ends, if all parameters had a hook in it."""
        if self.disabled or not ended.plain:
            return
        gradients = [gradient for index in ended.addresses if (gradient := self._parameters[index].grad) is not None]
        # A copy does not count: it may be in a bucket of DDP, which may be reduced before the pass ends.
        if [each.data_ptr() for each in gradients] == [*ended.addresses.values()]:
            self._read = tuple(ended.addresses)
            self.extremes.add_all(self._read, gradients)

    def compare(self, raw: Sequence[tuple[int, float, float]], *, one_pass: bool) -> None:
        """Compare what `read` read with `raw`, from the hooks. one_pass: the loop called one pass in this update."""
        read, found = self._read, self.extremes.read() if self._read else []
        self.clear()
        if not (read and one_pass):
            self.windows_left = _AGREED
        elif all(low > -_INFINITE and high < _INFINITE for _, low, high in found):
            self.disabled |= sorted(found) != sorted(raw)
            if (read[0], frozenset(read)) != (self.first, self.all):
                self.first, self.all, self.windows_left = read[0], frozenset(read), _AGREED
            self.windows_left = max(self.windows_left - 1, 0)

    def clear(self) -> None:
        self._read = ()
        self.extremes.clear()


class GradientHooks:
    """Reads the raw gradients of `parameters` since the last update of their optimizer.

    A hook computes the smallest and the largest element and waits for no device. On a GPU one launch reads many
    gradients, at the latest when the pass ends: before a wrapper replaces them by its sum.

    Per-parameter hooks cost more host time than reading the gradients costs a GPU, so they are thinned out. In most
    loops an update is one backward pass over the same parameters, each of which starts it with `.grad` None, and DDP
    reduces in its own buckets: the raw gradient stays in `.grad` until the pass ends. After two updates in which that
    held bit for bit, only the parameter whose gradient arrives first keeps a hook.

    The invariant of thinned hooks (`reads_at_end`): when a pass ends, `.grad` is what a hook on every parameter would
    have received. All hooks return, for good, when an update is not like those two:

    - a second pass, or a gradient or another hook is there before a pass (`backward_called`);
    - a pass within a pass, or one that the loop did not call for (`see`), or a reduction within a pass (`reducing`);
    - a pass that no hook saw (`backward_ended`), or gradients of other parameters (`read`). These are known only
      afterwards, and gradients are read as they are then.

    Every 64th window has all hooks and compares both ways. If the invariant breaks, a watch takes a sum or a repaired
    gradient for the rank's own: a repaired NaN, or rows that two ranks share, stay unseen.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        discarded: Callable[[], None],
        observed: tuple[int, Callable[[Tensor], None]],
        is_muted: Callable[[], bool],
    ) -> None:
        """discarded: called when the loop set a gradient to None within a window. observed: the index of a parameter,
        and a function that receives each of its gradients. is_muted: whether the watch itself runs the model.
        """
        self.halt: HaltSignal | None = None
        self.on_device: Callable[[], AbstractContextManager[None]] = nullcontext
        """Surrounds what is queued on a device when a pass ends."""
        self.gradient_arrived = False
        """Whether a gradient arrived since this was last set to False."""
        self._reads = True
        """Whether this window is read. In another one the hooks only note that gradients arrive."""
        self._unread = False
        """Whether gradients arrived in a window that is not read."""
        self.reads_at_end = False
        """True while hooks are thinned out and `.grad` is read when a pass ends."""
        self._discarded = discarded
        self._observed, self._is_muted = observed, is_muted
        self._parameters = parameters
        self._extremes = Extremes(parameters)
        self._end_reader = _EndReader(parameters)
        self._leftover: list[tuple[int, Tensor, int, Tensor, Tensor]] = []
        """Gradients from before the window: parameter, gradient, and its version and extremes when the window began."""
        self._calls = 0
        """The number of the loop's `backward` calls in this window, without those over other parameters."""
        self._read_at_end: frozenset[int] = frozenset()
        self._passes: dict[int, _BackwardPass] = {}
        """The passes of this window by torch's number; one may run within another."""
        self._windows = 1
        self.host_seconds = 0.0
        """Seconds of the host in the hooks."""
        self._started = bytearray(len(parameters))
        self._handles: dict[int, RemovableHandle] = {}
        self.backward_seen = False
        self._hook_all()

    def _hook_all(self) -> None:
        self.reads_at_end = False
        for index, parameter in enumerate(self._parameters):
            if index in self._handles or not parameter.requires_grad:
                continue
            handle = parameter.register_hook(self._hook(index, parameter))  # type: ignore[no-untyped-call]
            self._handles[index], hooks = handle, parameter._backward_hooks or {}
            # The loop's hooks may change gradients, so they come last. Torch calls hooks in the order of insertion,
            # which `OrderedDict.move_to_end` does not change.
            for key in [key for key in hooks if key != handle.id]:
                hooks[key] = hooks.pop(key)

    def _restore_all_hooks(self, *, begun: bool = True) -> None:
        self._end_reader.disabled = True
        self._hook_all()
        if begun:  # present gradients may belong to this window
            self._started = bytearray(b"\x01" * len(self._parameters))

    def backward_called(self) -> None:
        began = time.perf_counter()
        self._calls += 1
        if self.reads_at_end and self._reads:
            as_before = self._calls == 1 and all(
                parameter.grad is None and not has_other_hooks(parameter, own=int(index in self._handles))
                for index, parameter in enumerate(self._parameters)
            )
            if not as_before:
                self._restore_all_hooks(begun=self._calls > 1)
        self.host_seconds += time.perf_counter() - began

    def backward_ended(self) -> None:
        """The pass that the loop called is over, or failed."""
        if self._passes or self._unread:
            return
        if self.reads_at_end and self._reads and any(parameter.grad is not None for parameter in self._parameters):
            self.backward_seen = self.gradient_arrived = True
            self._add_present()
            self._restore_all_hooks()
        else:
            self._calls -= 1  # a pass over other parameters

    def _hook(self, index: int, parameter: torch.nn.Parameter) -> Callable[[Tensor], None]:
        show = self._observed[1] if index == self._observed[0] else None

        def see(gradient: Tensor | None) -> None:
            if gradient is None or self._is_muted():  # an output that the loss does not use has no gradient
                return
            began = time.perf_counter()
            if self.halt is not None:
                if self.halt.cause is not None:
                    self.halt.raise_if_halted()
                if self.halt.pending.armed:
                    self.halt.pending.backward(parameter)
            self.backward_seen = self.gradient_arrived = True
            if not self._reads:
                self._unread = True
                return
            before = parameter.grad
            if before is None and self._started[index] and not self.reads_at_end and index in self._extremes.added:
                self.discard()  # the loop set gradients to None, and this parameter is the first to show that
            number = torch._C._current_graph_task_id()
            current = self._passes.get(number)
            if current is None:
                if self.reads_at_end and (self._passes or self._calls != 1):
                    self._restore_all_hooks()
                self._passes[number] = current = _BackwardPass(self.reads_at_end)
                # Torch runs these callbacks in order. A wrapper queues its own after this one, because it receives a
                # gradient after this hook.
                torch.autograd.Variable._execution_engine.queue_callback(partial(self._end, number, current))
            if not self.reads_at_end:
                if not self._started[index]:
                    self._started[index] = True
                    if before is not None:
                        self._leftover.append((index, before, before._version, *extremes(before)))
                self._extremes.add(index, gradient)
                if current.plain:
                    fills = is_dense(gradient) and gradient.untyped_storage().nbytes() == gradient.nbytes
                    current.plain = before is None and fills and not has_other_hooks(parameter, own=1)
                    current.addresses[index] = gradient.data_ptr() if current.plain else 0
            if show is not None:
                show(gradient)
            self.host_seconds += time.perf_counter() - began

        return see

    def _end(self, number: int, ended: _BackwardPass) -> None:
        """Called when a pass ends, before a wrapper reduces its gradients: finish reading them."""
        if self._passes.get(number) is not ended:
            return  # the loop discarded the window meanwhile
        began = time.perf_counter()
        if ended.reads_at_end:
            with self.on_device():
                self._read_at_end = self._add_present()
            for index in self._read_at_end:  # parameters without a hook did not report that the pass reduces
                if self.halt is None or not self.halt.pending.armed:
                    break
                self.halt.pending.backward(self._parameters[index])
        else:
            with self.on_device():
                self._extremes.flush()
            if len(self._passes) == 1:
                self._end_reader.read(ended)
        self.host_seconds += time.perf_counter() - began

    def _add_present(self, known: frozenset[int] = frozenset()) -> frozenset[int]:
        """Read the present `.grad` of each parameter except those in `known`. Returns the parameters that were read."""
        present = {i: p.grad for i, p in enumerate(self._parameters) if p.grad is not None and i not in known}
        self._extremes.add_all(list(present), list(present.values()))
        return frozenset(present)

    def reducing(self, gradient: bool) -> None:
        """The loop reduces a tensor. gradient: it is the `.grad` of a parameter."""
        if gradient and self._reads and torch._C._current_graph_task_id() != -1:  # within a backward pass
            self._restore_all_hooks()

    @property
    def started(self) -> bool:
        """Whether a backward pass of this window has reached a parameter."""
        return bool(self._passes or self._extremes.added or self._unread)

    def _clear(self) -> None:
        self._extremes.clear()
        self._end_reader.clear()
        self._passes.clear()
        self._leftover.clear()
        self._calls, self._read_at_end, self.backward_seen = 0, frozenset(), False
        self._unread = False

    def discard(self) -> None:
        self._clear()
        self._started = bytearray(b"\x01" * len(self._parameters))
        self._discarded()

    def waiting(self) -> list[list[Tensor]]:
        """Lists of results on devices. Copy them to the CPU before `read`, so that it does not wait for a GPU."""
        return [*self._extremes.device_results(), *self._end_reader.extremes.device_results()]

    def read(self) -> RawSummary:
        """Return the raw gradients of this window, and decide whether hooks may be thinned out. Call once per update.

        With Triton it waits for no GPU if the lists of `waiting` were copied to the CPU before.
        """
        if self.reads_at_end and self._read_at_end != self._end_reader.all:
            self._end_reader.disabled = True
            self._add_present(self._read_at_end)
        seen = self._extremes.read()
        if not self.reads_at_end:
            self._end_reader.compare(seen, one_pass=self._calls == len(self._passes) == 1)
        # NaN fails every comparison, so this form finds it.
        bad = [owner for owner, low, high in seen if not (low > -_INFINITE and high < _INFINITE)]
        # A backward pass adds in place, or stores a sum with a graph. `autograd.grad` does neither.
        added = [
            (index, low, high)
            for index, gradient, version, low, high in self._leftover
            if gradient._version != version or getattr(self._parameters[index].grad, "requires_grad", False)
        ]
        lows, highs = to_floats([low for _, low, _ in added]), to_floats([high for _, _, high in added])
        stale = [index for (index, _, _), low, high in zip(added, lows, highs, strict=True) if low or high]
        return RawSummary(min(bad, default=-1) + 1, min(stale, default=-1) + 1, seen)

    def reset(self, *, reads: bool = True) -> None:
        """A window begins. reads: whether `read` will be called for it."""
        self._clear()
        self._started = bytearray(len(self._parameters))
        self._reads = reads
        if not reads:
            if self._end_reader.first >= 0 and not self._end_reader.disabled:
                self._thin_out()
            return
        self._windows += 1
        if self._windows % _RECHECK == 0:
            self._end_reader.windows_left = max(self._end_reader.windows_left, 1)
        if self._end_reader.windows_left or self._end_reader.disabled:
            self._hook_all()
        else:
            self._thin_out()

    def _thin_out(self) -> None:
        self.reads_at_end = True
        for index in self._handles.keys() - {self._end_reader.first, self._observed[0]}:
            self._handles.pop(index).remove()

    def close(self) -> None:
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()


class Reductions:
    """Records the loop's reductions in one window; all ranks of a correct loop record the same `calls`.

    It compares addresses at each call to find the member of a tensor, because an allocator reuses addresses. strided:
    index + 1 of the last member that was reduced although its gradient has holes in memory; 0 for none.
    """

    def __init__(self, members: Sequence[torch.nn.Parameter]) -> None:
        self._members = members
        self._same_form: dict[tuple[int, torch.dtype], list[int]] = defaultdict(list)
        for index, parameter in enumerate(members):
            self._same_form[parameter.numel(), parameter.dtype].append(index)
        self.clear()

    def clear(self) -> None:
        self.calls: list[tuple[object, ...]] = []
        self._next, self.strided = 0, 0

    def add(self, tensor: Tensor) -> bool:
        """The loop is about to reduce `tensor`. Returns whether it is the gradient of a member."""
        # Most loops reduce the gradients in order.
        if self._next < len(self._members) and same_memory(tensor, self._members[self._next].grad):
            index = self._next
        else:
            candidates = self._same_form.get((tensor.numel(), tensor.dtype), ())
            index = next((index for index in candidates if same_memory(tensor, self._members[index].grad)), -1)
        strided = tensor.layout == torch.strided and not tensor.is_contiguous()
        # A backend sums raw memory, which is correct for a permutation that all ranks share, and wrong for holes.
        order = tensor.stride() if strided else ()
        self.calls.append((index, tuple(tensor.shape), order, str(tensor.dtype)))
        if index >= 0:
            self._next = index + 1
            by_stride = sorted(range(tensor.dim()), key=tensor.stride, reverse=True) if strided else []
            if strided and not tensor.permute(by_stride).is_contiguous():
                self.strided = index + 1
        return index >= 0


def same_memory(tensor: Tensor, gradient: Tensor | None) -> bool:
    """Whether a collective over `tensor` changes `gradient`. A sparse tensor has no address: only itself counts."""
    if gradient is None or gradient.layout != tensor.layout:
        return False
    return tensor is gradient or (tensor.layout == torch.strided and tensor.data_ptr() == gradient.data_ptr() != 0)
