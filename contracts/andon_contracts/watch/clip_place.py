"""Where in an update a loop clips: once, of the gradient as it is applied, or of what is still scaled, not yet reduced,
or not yet whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from andon_contracts.laws.practice import ClipSeen


class ClipPlace:
    """The clip calls of the present window. passes: how many forward passes with gradients there were so far."""

    def __init__(self, passes: Callable[[], int], thrown_away: Callable[[], int]) -> None:
        """thrown_away: how often gradients were thrown away so far."""
        self._passes, self._thrown_away = passes, thrown_away
        self._clipped: dict[int, tuple[Tensor, int]] = {}
        self._thrown = 0
        self.seen = ClipSeen(0)

    def clipping(self, parameters: Sequence[Tensor]) -> None:
        """The gradients of `parameters` are about to be clipped."""
        if self._thrown_away() != self._thrown:
            self.clear()
        passes = self._passes()
        if self._clipped and any(self._clipped.get(id(each), (each, passes))[1] < passes for each in parameters):
            self.seen |= ClipSeen.UNFINISHED
        self._clipped.update({id(each): (each, passes) for each in parameters if each.grad is not None})
        if self._clipped:
            self.seen |= ClipSeen.CLIPPED

    def reducing(self, tensor: Tensor, group: object) -> None:
        """A tensor is about to be reduced."""
        if self._clipped and (group is None or group is dist.group.WORLD):
            gradients = [each.grad for each, _ in self._clipped.values() if each.grad is not None]
            if any(tensor is each or (tensor.data_ptr() == each.data_ptr() != 0) for each in gradients):
                self.seen |= ClipSeen.UNREDUCED

    def unscaling(self, scaler: Any, optimizer: Any) -> None:
        """A loss scaler is about to divide the gradients of `optimizer`."""
        held = (each for group in optimizer.param_groups for each in group["params"])
        if any(id(each) in self._clipped for each in held) and scaler.is_enabled() and scaler.get_scale() != 1.0:
            self.seen |= ClipSeen.SCALED

    def clear(self) -> None:
        """Another window begins, or this one does anew."""
        self._clipped.clear()
        self._thrown, self.seen = self._thrown_away(), ClipSeen(0)
