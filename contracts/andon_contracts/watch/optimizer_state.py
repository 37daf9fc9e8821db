"""The state of an optimizer for some parameters (moments, counts), read every step with little work."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import chain
from operator import is_

import torch
from torch import Tensor

from andon_contracts.observe import Look, Observer
from andon_contracts.watch.values import Nest, state_tensors


class OptimizerState:
    """The state of `optimizer` for `members`, in one order on all ranks: by member, then by the text of the names.

    `_sizes`, `_names` and `_values` are the layout of the last look, if all values were tensors. The tensors are held,
    so that no other one can have their identities.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, members: Sequence[torch.nn.Parameter]) -> None:
        self.observer = Observer(stable=True)
        self._optimizer = optimizer
        self._members = members
        self._rest = Nest()
        self._orders: dict[tuple[Hashable, ...], tuple[Hashable, ...]] = {}
        self._tensors: tuple[Tensor, ...] = ()
        self._digest_of_rest = 0
        self._sizes: list[int] | None = None
        self._names: list[Hashable] = []
        self._values: list[object] = []

    def look(self) -> Look:
        """Read all tensors, names and other values of the state as it is now. Waits for no device."""
        kept = list(map(self._optimizer.state.get, self._members))
        as_before = (
            self._sizes is not None
            and set(map(type, kept)) == {dict}
            and list(map(len, kept)) == self._sizes  # type: ignore[arg-type]
            and list(chain.from_iterable(kept)) == self._names  # type: ignore[arg-type]
            and all(map(is_, chain.from_iterable(map(dict.values, kept)), self._values))  # type: ignore[arg-type]
        )
        if not as_before:
            self._sort(kept)
        return self.observer.look(self._tensors, beside=self._digest_of_rest)

    def _sort(self, kept: Sequence[object]) -> None:
        tensors: list[Tensor] = []
        rest: list[object] = []
        for each in kept:
            if not isinstance(each, dict):
                state_tensors(each, tensors, rest)
                continue
            names = tuple(each)
            if names not in self._orders:
                # Ranks may have filled it in different orders, and names may be of several types.
                self._orders[names] = tuple(sorted(names, key=repr))
            rest.append(self._orders[names])
            for name in self._orders[names]:
                if isinstance(each[name], Tensor):
                    tensors.append(each[name])
                else:
                    state_tensors(each[name], tensors, rest)
        # Tensors of whole 8-byte words first: after a count of 4 bytes, as every parameter has one, a GPU would have to
        # copy all moments to where their words begin.
        tensors.sort(key=lambda each: each.numel() * each.element_size() % 8 != 0)
        self._tensors, self._digest_of_rest = tuple(tensors), self._rest.digest(rest)
        nests = [each for each in kept if type(each) is dict]
        self._values = [value for nest in nests for value in nest.values()]
        all_tensors = len(nests) == len(kept) and all(isinstance(value, Tensor) for value in self._values)
        self._sizes, self._names = list(map(len, nests)) if all_tensors else None, list(chain.from_iterable(nests))
