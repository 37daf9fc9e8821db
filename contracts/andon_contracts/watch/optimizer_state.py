"""What an optimizer keeps for some parameters (moments, counts), read every step with little work."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import chain
from operator import is_

import torch
from torch import Tensor

from andon_contracts.observe import Look, Observer
from andon_contracts.watch.values import Nest, state_tensors

_WORD = 8
"""Bytes; what is looked at is read in such words."""


class OptimizerState:
    """The state of `optimizer` for `members`, in an order that has no chance: theirs, and that of the names' text."""

    def __init__(self, optimizer: torch.optim.Optimizer, members: Sequence[torch.nn.Parameter]) -> None:
        self.observer = Observer(stable=True)
        self._optimizer = optimizer
        self._members = members
        self._rest = Nest()
        self._orders: dict[tuple[Hashable, ...], tuple[Hashable, ...]] = {}
        self._tensors: tuple[Tensor, ...] = ()
        self._digest_of_rest = 0
        self._sizes: list[int] | None = None
        """How much was kept for each member, the names and the values of it all, where all values were tensors."""
        self._names: list[Hashable] = []
        self._values: list[object] = []

    def look(self) -> Look:
        """What is found of all tensors, names and other values that are there now. No wait for a device."""
        kept = list(map(self._optimizer.state.get, self._members))
        if not self._as_before(kept):
            self._sort_all(kept)
        return self.observer.look(self._tensors, beside=self._digest_of_rest)

    def _as_before(self, kept: Sequence[object]) -> bool:
        """Whether the same tensors are kept under the same names; they alone are held, so that no other can be them."""
        if self._sizes is None or set(map(type, kept)) != {dict} or list(map(len, kept)) != self._sizes:  # type: ignore[arg-type]
            return False
        if list(chain.from_iterable(kept)) != self._names:  # type: ignore[arg-type]
            return False
        return all(map(is_, chain.from_iterable(map(dict.values, kept)), self._values))  # type: ignore[arg-type]

    def _sort_all(self, kept: Sequence[object]) -> None:
        tensors: list[Tensor] = []
        rest: list[object] = []
        for each in kept:
            self._sort(each, tensors, rest)
        # Whole words first: behind a count of 4 bytes, as every parameter has one, a GPU would have to copy all moments
        # to where their words begin.
        tensors.sort(key=lambda each: each.numel() * each.element_size() % _WORD != 0)
        self._tensors, self._digest_of_rest = tuple(tensors), self._rest.digest(rest)
        self._sizes = None
        nests = [each for each in kept if type(each) is dict]
        self._values = [value for nest in nests for value in nest.values()]
        if len(nests) == len(kept) and all(isinstance(value, Tensor) for value in self._values):
            self._sizes, self._names = list(map(len, nests)), list(chain.from_iterable(nests))

    def _sort(self, kept: object, tensors: list[Tensor], rest: list[object]) -> None:
        if not isinstance(kept, dict):
            state_tensors(kept, tensors, rest)
            return
        names = tuple(kept)
        order = self._orders.get(names)
        if order is None:
            # Ranks may have filled it in different orders, and names may be of several types.
            order = self._orders[names] = tuple(sorted(names, key=repr))
        rest.append(order)
        for name in order:
            value = kept[name]
            if isinstance(value, Tensor):
                tensors.append(value)
            else:
                state_tensors(value, tensors, rest)
