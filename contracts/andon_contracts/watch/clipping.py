"""Clip calls that are not one call with the 2-norm over what one optimizer holds: groups clipped apart, other norms,
one norm over the parameters of several optimizers. Each call is held to the limit by itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from andon_contracts.laws.loop import torch_norm_error
from andon_contracts.laws.update import clipped_norm
from andon_contracts.observe import norm_of, plain

_ALIKE = 1e-3


@dataclass(frozen=True)
class Clipped:
    """One call: what it clipped of `members`, the norm by which it did, of which order, and the members' own."""

    members: frozenset[int]
    order: float
    norm: float
    own: float
    alone: bool
    """Whether it clipped nothing else."""


class Clips:
    """The clip calls of one window."""

    def __init__(self, members: Sequence[torch.nn.Parameter]) -> None:
        self._members = members
        self._place = {id(parameter): index for index, parameter in enumerate(members)}
        self._calls: list[Clipped] = []

    def add(self, parameters: Sequence[Tensor], told: Tensor) -> None:
        """The gradients of `parameters` are about to be clipped, by the norm `told`."""
        there = [p for p in parameters if p.grad is not None]
        mine = frozenset(self._place[id(p)] for p in there if id(p) in self._place)
        order = _order_of([plain(p.grad) for p in there if p.grad is not None], float(told))
        self._calls.append(Clipped(mine, order, float(told), self._own(mine, order), len(mine) == len(there)))

    def _own(self, members: frozenset[int], order: float) -> float:
        return _norm([plain(g) for i in members if (g := self._members[i].grad) is not None], order)

    def left(self, limit: float) -> tuple[float, float] | None:
        """The norm that was clipped and what is left of it, of the call that is furthest from the law.

        None where there was nothing but the one plain call, and where the calls do not deal out what has a gradient:
        the gradient is then held to the law as one.
        """
        there = {index for index, parameter in enumerate(self._members) if parameter.grad is not None}
        dealt = sum(len(call.members) for call in self._calls)
        if dealt != len(there) or there != frozenset[int]().union(*(call.members for call in self._calls)):
            return None
        if len(self._calls) == 1 and self._calls[0].order == 2 and self._calls[0].alone:
            return None
        found = [(c.norm, c.norm * self._own(c.members, c.order) / c.own if c.own else 0.0) for c in self._calls]
        return max(found, key=lambda pair: abs(pair[1] - clipped_norm(pair[0], limit)), default=None)

    def clear(self) -> None:
        """Another window begins."""
        self._calls.clear()


def _norm(tensors: Sequence[Tensor], order: float) -> float:
    if order == 2:
        return norm_of(tensors)
    norms = [float(torch.linalg.vector_norm(t.float(), order)) for t in tensors if t.numel()]
    return max(norms, default=0.0) if order == math.inf else sum(norms)


def _order_of(gradients: Sequence[Tensor], told: float) -> float:
    """Which norm `told` is: 2, unless it is only that of another order."""
    longest = max((t.numel() for t in gradients if t.device.type == "cpu"), default=0)
    alike = max(_ALIKE, torch_norm_error(longest))
    orders = (2.0, math.inf, 1.0)
    return next((o for o in orders if math.isclose(_norm(gradients, o), told, rel_tol=alike)), 2.0)
