"""What an optimizer keeps for some parameters (moments, counts), read every step with little work."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from andon_contracts.watch.reading import Reader, Text, state_tensors


class Kept:
    """The state of `optimizer` for `members`, in an order that has no chance: theirs, and that of the names' text."""

    def __init__(self, optimizer: torch.optim.Optimizer, members: Sequence[torch.nn.Parameter]) -> None:
        self.reader = Reader(stable=True)
        self._optimizer = optimizer
        self._members = members
        self._rest = Text()
        self._orders: dict[tuple[Hashable, ...], tuple[Hashable, ...]] = {}

    def digest(self) -> int:
        """The digest in [0, 2^64) of all tensors, names and other values that are there now."""
        tensors: list[Tensor] = []
        rest: list[object] = []
        state = self._optimizer.state
        for parameter in self._members:
            self._sort(state.get(parameter), tensors, rest)
        return (self.reader.read(tensors).digest + self._rest.digest(rest)) % (1 << 64)

    def _sort(self, kept: object, tensors: list[Tensor], rest: list[object]) -> None:
        if not isinstance(kept, dict):
            state_tensors(kept, tensors, rest)
            return
        names = tuple(kept)
        order = self._orders.get(names)
        if order is None:
            order = self._orders[names] = tuple(sorted(names, key=repr))
        rest.append(order)
        for name in order:
            value = kept[name]
            if isinstance(value, Tensor):
                tensors.append(value)
            else:
                state_tensors(value, tensors, rest)
