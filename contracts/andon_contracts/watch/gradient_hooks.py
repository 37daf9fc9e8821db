"""The raw gradients of a loop, read before they are averaged, clipped or repaired, and the reductions of that loop.

It does not see repairs by a hook on an autograd node, because torch does not list those hooks.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from andon_contracts.liveness.halt import HaltSignal
from andon_contracts.observe import Extremes, extremes, to_floats


@dataclass(frozen=True)
class RawSummary:
    """The raw gradients of one window. extremes: (parameter index, smallest, largest element) of each gradient.

    nonfinite, stale: index + 1 of the first parameter whose gradient is not finite, or that had a nonzero gradient when
    the window began and added to it; 0 for none.
    """

    stale: int
    extremes: Sequence[tuple[int, float, float]]

    @property
    def fingerprint(self) -> int:
        """An integer in [0, 2^62) that differs for gradients of different rows; 0 if all gradients are zero."""
        return hash(tuple(sorted(self.extremes))) % (1 << 62) if self.nonzero else 0

    @property
    def nonfinite(self) -> list[int]:
        """The parameters with a gradient that is not finite, in the order in which gradients were added."""
        # NaN fails every comparison, so this form finds it.
        bad = (owner for owner, low, high in self.extremes if not (low > -math.inf and high < math.inf))
        return list(dict.fromkeys(bad))

    @property
    def received(self) -> set[int]:
        return {owner for owner, _, _ in self.extremes}

    @property
    def nonzero(self) -> set[int]:
        return {owner for owner, low, high in self.extremes if low != 0 or high != 0}


class GradientHooks:
    """Reads the raw gradients of `parameters` since the last update of their optimizer.

    A hook computes the smallest and the largest element and waits for no device. In a window that is not read only one
    parameter has a hook, which shows that gradients arrive.
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
        self.gradient_arrived = self.backward_seen = False
        """Whether a gradient arrived since this was last set to False, by the loop's pass and by its window."""
        self.started = False  # whether a backward pass of this window has reached a parameter
        self.host_seconds = 0.0
        self._reads = True
        self._discarded = discarded
        self._observed, self._is_muted = observed, is_muted
        self._parameters = parameters
        self._extremes = Extremes()
        self.waiting = self._extremes.device_results
        self._leftover: list[tuple[int, Tensor, int, Tensor, Tensor]] = []
        """Gradients from before the window: parameter, gradient, and its version and extremes when the window began."""
        self._started = bytearray(len(parameters))
        self._handles: dict[int, RemovableHandle] = {}
        self._hook_all()

    def _hook_all(self) -> None:
        for index, parameter in enumerate(self._parameters):
            if index in self._handles or not parameter.requires_grad:
                continue
            handle = parameter.register_hook(self._hook(index, parameter))  # type: ignore[no-untyped-call]
            self._handles[index], hooks = handle, parameter._backward_hooks or {}
            # The loop's hooks may change gradients, so they come last. Torch calls hooks in the order of insertion,
            # which `OrderedDict.move_to_end` does not change.
            for key in [key for key in hooks if key != handle.id]:
                hooks[key] = hooks.pop(key)

    def pass_ended(self) -> None:
        """The pass that the loop called is over, or failed."""
        if not self._reads and not self.gradient_arrived and any(p.grad is not None for p in self._parameters):
            self._note_arrival(next(p for p in self._parameters if p.grad is not None))

    def _note_arrival(self, parameter: torch.nn.Parameter) -> None:
        if self.halt is not None:
            if self.halt.cause is not None:
                self.halt.raise_if_halted()
            if self.halt.pending.armed:
                self.halt.pending.backward(parameter)
        self.backward_seen = self.gradient_arrived = True

    def _hook(self, index: int, parameter: torch.nn.Parameter) -> Callable[[Tensor], None]:
        show = self._observed[1] if index == self._observed[0] else None

        def see(gradient: Tensor | None) -> None:
            if gradient is None or self._is_muted():  # an output that the loss does not use has no gradient
                return
            began = time.perf_counter()
            self._note_arrival(parameter)
            self.started = True
            if not self._reads:
                return
            before = parameter.grad
            if before is None and index in self._extremes.added:
                self.discard()  # the loop set gradients to None, and this parameter is the first to show that
                self.started = True
            elif before is not None and not self._started[index]:
                self._leftover.append((index, before, before._version, *extremes(before)))
            self._started[index] = True
            self._extremes.add(index, gradient)
            if show is not None:
                show(gradient)
            self.host_seconds += time.perf_counter() - began

        return see

    def _clear(self) -> None:
        self._extremes.clear()
        self._leftover.clear()
        self.started = self.backward_seen = False

    def discard(self) -> None:
        self._clear()
        self._started = bytearray(b"\x01" * len(self._parameters))
        self._discarded()

    def read(self) -> RawSummary:
        """The raw gradients of this window. Waits for no device if the lists of `waiting` were copied before."""
        # A backward pass adds in place, or stores a sum with a graph. `autograd.grad` does neither.
        added = [
            (index, low, high)
            for index, gradient, version, low, high in self._leftover
            if gradient._version != version or getattr(self._parameters[index].grad, "requires_grad", False)
        ]
        lows, highs = to_floats([low for _, low, _ in added]), to_floats([high for _, _, high in added])
        stale = [index for (index, _, _), low, high in zip(added, lows, highs, strict=True) if low or high]
        return RawSummary(min(stale, default=-1) + 1, self._extremes.read())

    def reset(self, *, reads: bool = True) -> None:
        """A window begins. reads: whether `read` will be called for it."""
        self._clear()
        self._started = bytearray(len(self._parameters))
        self._reads = reads
        if reads and len(self._handles) < len(self._parameters):
            self._hook_all()
        elif not reads:
            # Preferably one that a wrapper reduces, because other ranks wait for such a pass.
            followed = frozenset[int]() if self.halt is None else self.halt.pending.parameters
            for index in sorted(self._handles, key=lambda index: (id(self._parameters[index]) in followed, index))[:-1]:
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
        self.strided = 0

    def add(self, tensor: Tensor) -> None:
        """The loop is about to reduce `tensor`."""
        candidates = self._same_form.get((tensor.numel(), tensor.dtype), ())
        index = next((index for index in candidates if same_memory(tensor, self._members[index].grad)), -1)
        strided = tensor.layout == torch.strided and not tensor.is_contiguous()
        # A backend sums raw memory, which is correct for a permutation that all ranks share, and wrong for holes.
        order = tensor.stride() if strided else ()
        self.calls.append((index, tuple(tensor.shape), order, str(tensor.dtype)))
        if index >= 0:
            by_stride = sorted(range(tensor.dim()), key=tensor.stride, reverse=True) if strided else []
            if strided and not tensor.permute(by_stride).is_contiguous():
                self.strided = index + 1


def same_memory(tensor: Tensor, gradient: Tensor | None) -> bool:
    """Whether a collective over `tensor` changes `gradient`. A sparse tensor has no address: only itself counts."""
    if gradient is None or gradient.layout != tensor.layout:
        return False
    return tensor is gradient or (tensor.layout == torch.strided and tensor.data_ptr() == gradient.data_ptr() != 0)
