"""What a watch hears of the loop's own calls, handed on to the optimizers that they concern."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from andon_contracts.begun import Begun
from andon_contracts.watch.lane import Lane


class Hearing:
    """The calls that `intercept` tells a watch of."""

    _lanes: dict[int, Lane]
    _begun: Begun | None

    def clipping(self, parameters: Sequence[Tensor], norm: Tensor | None) -> None:
        """The loop is about to clip."""
        for lane in self._lanes.values():
            lane.clipping(parameters, norm)

    def updates_of(self, optimizer: object) -> int | None:
        """The updates of `optimizer` so far; None for one that is not watched."""
        lane = self._lanes.get(id(optimizer))
        return None if lane is None else lane.updates

    def skipped(self, optimizer: object) -> None:
        """A loss scaler has left out an update."""
        self._lanes[id(optimizer)].skip()

    def reducing(self, tensor: Tensor, group: object, waits: bool) -> None:
        """The loop is about to reduce."""
        if self._begun is not None:
            self._begun.reducing(group, waits=waits)
        for lane in self._lanes.values():
            lane.reducing(tensor, group)

    def resumed(self) -> None:
        """The call that reduces is over."""
        if self._begun is not None:
            self._begun.resumed()
