"""What a training loop offers to be judged, and what it may tell. Everything but `model` and `train` is optional."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from andon_falsify.subjects.case import Case

Make = Callable[[Case], "Loop"]
"""What `--subject module:make` names: called once on every rank, inside a process group that is already there."""


class Told(Protocol):
    """What a loop may tell while it trains. Weights, gradients and updates are seen without it."""

    def rows(self, ids: Sequence[int]) -> None:
        """The rows of the next forward pass on this rank; needed only where `Case.dataset` is not what is trained on.

        Rows of `Case.dataset` are recognised by their content when the model is called.
        """
        ...

    def loss(self, value: float | Tensor) -> None:
        """What the loop reports as the loss of the update that follows, or of the one that was just made."""
        ...


class Loop(Protocol):
    """A training loop on one rank. `model` is what is trained, wrapped or not."""

    model: nn.Module

    def train(self, told: Told) -> None:
        """Train to the end of the case: its epochs, or its `max_steps`. Collective."""
        ...


@runtime_checkable
class Evaluates(Protocol):
    """A loop that evaluates: claims about evaluation apply."""

    def evaluate(self) -> Mapping[str, float]:
        """Loss and accuracy over all rows of the case, as the loop reports them: `{"loss": ..., "accuracy": ...}`."""
        ...


@runtime_checkable
class Restores(Protocol):
    """A loop that saves and loads: claims about resuming apply."""

    def save(self, folder: Path) -> None:
        """Write all that is needed to go on. Called on every rank, after an update."""
        ...

    def load(self, folder: Path) -> None:
        """Take up what `save` wrote, before `train`, which then goes on with the next update."""
        ...


@runtime_checkable
class Recomputes(Protocol):
    """A loop over a model of its own: the law is taken from its forward pass, and the verdict says so."""

    def loss_sum(self, model: nn.Module, ids: Sequence[int]) -> tuple[Tensor, int]:
        """The sum of the losses of the rows `ids` under `model` (a copy in float64), and their number."""
        ...
