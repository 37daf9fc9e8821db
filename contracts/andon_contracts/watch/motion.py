"""Whether an update moved what it had to move: parameters that kept every bit although their update could be held."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from andon_contracts.multi_tensor import FLOATS, bring, equal_each, extremes_of_keys, list_extremes, listable
from andon_contracts.observe import extremes, numbers, plain

_SPARSE = 64
_FEW = 8
"""A parameter of so few elements may rightly be left as it is in one update, as Rprop does where a sign turns."""
_NOISE = 1e-5
"""Gradients that are so much smaller than the largest are rounding errors of zero, as before a batch norm."""


class Motion:
    """The `members` of `optimizer` before an update, of some updates, and which of them it left as they were."""

    def __init__(self, optimizer: torch.optim.Optimizer, members: Sequence[torch.nn.Parameter]) -> None:
        self._optimizer = optimizer
        self._members = members
        self._before: list[Tensor] = []
        self._moving: list[int] = []
        self._sizes: dict[int, float] = {}
        self._again: set[int] = set()
        """Small members that kept every bit in the last window: some optimizers leave one update of them out."""

    def remember(self, window: int) -> None:
        """What is there before update `window` of the watch, of those updates that are looked at."""
        self._before, self._moving = [], []
        if window <= 4 or window & (window - 1) == 0 or window % _SPARSE == 0 or self._again:
            self._before = [plain(p).clone() for p in self._members]
            rates = {
                id(p): float(group.get("lr", 1)) for group in self._optimizer.param_groups for p in group["params"]
            }
            there = {
                i: p.grad
                for i, p in enumerate(self._members)
                if p.grad is not None and plain(p.grad).numel() and rates[id(p)]
            }
            found = zip(there, _extremes_of(list(there.values())), strict=True)
            sizes = {i: max(abs(low), abs(high)) for i, (low, high) in found}
            least = _NOISE * max(sizes.values(), default=0.0)
            self._moving = [i for i, size in sizes.items() if size > least]
            self._sizes = {i: rates[id(self._members[i])] * sizes[i] for i in self._moving}

    def unmoved(self) -> list[int]:
        """The members that kept every bit although their update could have been held."""
        moved = {i: plain(self._members[i]) for i in self._moving}
        before, self._before, self._moving = self._before, [], []
        equal = equal_each([before[i] for i in moved], list(moved.values()))
        kept = [i for i, same in zip(moved, equal, strict=True) if same]
        if not kept:
            self._again = set()
            return []
        steps = numbers([(now - before[i]).abs().max().double() for i, now in moved.items() if i not in kept])
        found = [i for i in kept if not self._rounds_away(i, max(steps, default=0.0))]
        few = {i for i in found if self._members[i].numel() <= _FEW}
        again, self._again = few & self._again, few
        return [i for i in found if i not in few or i in again]

    def _rounds_away(self, index: int, step: float) -> bool:
        """Whether an update of the member is less than half of what its precision tells apart, and rightly so.

        step: how far others were moved. What is held in 16 bits is judged all the same: there it is the fault.
        """
        weight = plain(self._members[index])
        if weight.dtype not in (torch.float32, torch.float64):
            return False
        by_gradient = self._sizes[index]
        if self._optimizer.state.get(self._members[index]):
            # Moments scale the gradient away: an update is about as large as those of others, or as the rate.
            rate = self._rate_of(index)
            by_gradient = step or max(by_gradient, rate)
        least = float(weight.abs().min())
        # `ulp` is of fp64, which has 29 bits more than fp32.
        spacing = math.ulp(least) * (2.0**29 if weight.dtype == torch.float32 else 1.0)
        return by_gradient <= spacing / 2

    def _rate_of(self, index: int) -> float:
        member = self._members[index]
        groups = self._optimizer.param_groups
        return next(float(g.get("lr", 1)) for g in groups if any(p is member for p in g["params"]))


def _extremes_of(tensors: Sequence[Tensor]) -> list[tuple[float, float]]:
    """The `extremes` of each, none of which is empty: those of a GPU with Triton with one launch for each dtype."""
    lists: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, tensor in enumerate(map(plain, tensors)):
        if tensor.dtype in FLOATS and tensor.is_contiguous() and listable(tensor.device):
            lists.setdefault((tensor.device, tensor.dtype), []).append(index)
    keys = [list_extremes([plain(tensors[i]) for i in each]) for each in lists.values()]
    listed = {i for each in lists.values() for i in each}
    others = {i: extremes(tensor) for i, tensor in enumerate(tensors) if i not in listed}
    lows, highs = numbers([low for low, _ in others.values()]), numbers([high for _, high in others.values()])
    found = dict(zip(others, zip(lows, highs, strict=True), strict=True))
    bring(keys)
    for each, these in zip(lists.values(), keys, strict=True):
        found |= zip(each, extremes_of_keys(these), strict=True)
    return [found[index] for index in range(len(tensors))]
