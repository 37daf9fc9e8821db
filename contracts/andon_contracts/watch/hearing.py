"""What a watch hears of the loop's own calls, handed on to the optimizers that they concern."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from andon_contracts.liveness.halt import HaltSignal
from andon_contracts.watch.optimizer_probe import OptimizerProbe


class Hearing:
    """The calls that `intercept` tells a watch of."""

    def __init__(self, probes: Mapping[int, OptimizerProbe], signal: HaltSignal | None) -> None:
        """probes: by the identity of their optimizer. signal: what stops all ranks, and knows who waits for whom."""
        self._probes = probes
        self._signal = signal
        self._begun = None if signal is None else signal.begun

    def clipping(self, parameters: Sequence[Tensor], norm: Tensor | None) -> None:
        """The loop is about to clip."""
        for probe in self._probes.values():
            probe.clipping(parameters, norm)

    def updates_of(self, optimizer: object) -> int | None:
        """The updates of `optimizer` so far; None for one that is not watched."""
        probe = self._probes.get(id(optimizer))
        return None if probe is None else probe.updates

    def skipped(self, optimizer: object) -> None:
        """A loss scaler has left out an update."""
        self._probes[id(optimizer)].skip()

    def reducing(self, tensor: Tensor, group: object, waits: bool) -> None:
        """The loop is about to reduce."""
        if self._begun is not None:
            self._begun.reducing(group, waits=waits)
        for probe in self._probes.values():
            probe.reducing(tensor, group)

    def resumed(self) -> None:
        """The call that reduces is over."""
        if self._begun is not None:
            self._begun.resumed()

    def lost(self, error: BaseException) -> None:
        """A reduction of the loop failed."""
        if self._signal is not None:
            self._signal.lost(error)
