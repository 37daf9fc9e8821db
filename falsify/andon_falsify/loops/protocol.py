"""What a training loop offers to be judged, and what it may tell. Everything but `model` and `train` is optional.

A loop may also have `halts = True` (it stops on every rank before an update that is not finite) and
`to_the_bit = True` (its result has the same bits on any number of ranks): claims that are judged only where made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from andon_falsify.subjects.case import Case

Make = Callable[[Case], "Loop"]
"""What `--subject module:make` names: called once on every rank, inside a process group that is already there.

The environment names the rank as torch's launcher does (RANK, WORLD_SIZE, LOCAL_RANK). The global random generators
are seeded differently on each rank: what has to be equal, the loop seeds itself.
"""


class Told(Protocol):
    """What a loop may tell while it trains. Weights, gradients and updates are seen without it."""

    def rows(self, ids: Sequence[int]) -> None:
        """The rows of the next forward pass on this rank; needed only where `Case.rows` are not what is trained on.

        Rows of the case are recognised by their content when the model is called.
        """
        ...

    def loss(self, value: float | Tensor) -> None:
        """What the loop reports as the loss of an update: of the one whose forward passes began, else of the last."""
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
        """Loss and accuracy over all rows of the case, as the loop reports them: `{"loss": ..., "accuracy": ...}`.

        Called on every rank when the training is over. A rank that reports nothing returns `{}`; what any other returns
        is judged.
        """
        ...


@runtime_checkable
class Restores(Protocol):
    """A loop that saves and loads: claims about resuming apply."""

    def save(self, folder: Path) -> None:
        """Write all that is needed to go on into `folder`, which exists. Called on every rank, between two updates.

        Exactly: when the model is called for the first time after the update, or after `train` where it is not.
        """
        ...

    def load(self, folder: Path) -> None:
        """Take up what `save` wrote, before `train`, which then goes on with the next update."""
        ...


@runtime_checkable
class Schedules(Protocol):
    """A loop with a learning-rate schedule of its own; without it the rate is `Case.lr` at every update."""

    def rate(self, update: int) -> float:
        """The learning rate that `update` (from 1) is to have: a closed form, not what the optimizer holds."""
        ...


@runtime_checkable
class Decays(Protocol):
    """A loop that declares what decays; without it every group decays by `Case.weight_decay`, or not at all."""

    def decay(self, name: str) -> float:
        """The weight decay that the parameter `name` of the model is to have: a rule, not what the optimizer holds."""
        ...


@runtime_checkable
class Tunes(Protocol):
    """A loop that declares other settings of its optimizer than torch's defaults, which hold without it."""

    def tuned(self, update: int) -> Mapping[str, object]:
        """`{"betas": (0.9, 0.95), "eps": 1e-6}` of `update` (from 1), in every group: by torch's names for them."""
        ...


@runtime_checkable
class Recomputes(Protocol):
    """A loop over a model of its own: the law is taken from its forward pass, and the verdict says so."""

    def loss_sum(self, model: nn.Module, ids: Sequence[int]) -> tuple[Tensor, int]:
        """The sum of the losses of the rows `ids` under `model` (a copy in float64), and their number."""
        ...
