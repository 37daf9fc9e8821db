"""Which of its gradients a loop reduced in one window, and in which order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from andon_contracts.watch.reading import text_digest

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
        """The last member (index plus one) whose gradient was reduced although it is not contiguous; 0: none."""

    def add(self, tensor: Tensor) -> None:
        """`tensor` is about to be reduced."""
        index = self._index(tensor)
        self._calls.append((index, tuple(tensor.shape), str(tensor.dtype)))
        if index >= 0:
            self._next = index + 1
            if tensor.layout == torch.strided and not tensor.is_contiguous():
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


def _is(tensor: Tensor, gradient: Tensor | None) -> bool:
    if gradient is None or gradient.layout != tensor.layout:
        return False
    return tensor is gradient or (tensor.layout == torch.strided and tensor.data_ptr() == gradient.data_ptr() != 0)
