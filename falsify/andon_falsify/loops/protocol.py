"""What a training loop offers to be judged, and what it may report. Only `model` and `train` are required."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from torch import Tensor, nn

from andon_falsify.subjects.case import Case

Make = Callable[[Case], "Loop"]
"""What `--subject module:make` names: called once on every rank, inside a process group that exists already.

The environment is that of torch's launcher (RANK, WORLD_SIZE, LOCAL_RANK, ...). The global random generators are seeded
differently on each rank. The loop itself seeds whatever must be equal on all ranks.
"""


class Told(Protocol):
    """What a loop may report while it trains. Weights, gradients and updates are observed without it."""

    def rows(self, ids: Sequence[int]) -> None:
        """Report the rows of this rank's next forward pass: needed only if their content is not that of `Case.rows`."""

    def loss(self, value: float | Tensor) -> None:
        """The loss of an update: of the update whose forward passes have begun, or else of the last one."""


class Loop(Protocol):
    """A training loop on one rank. `model` is the model that it trains, wrapped or not.

    A loop may have any method of `FurtherMethods`, and two attributes: `halts = True` (it stops on every rank before an
    update that is not finite) and `to_the_bit = True` (its result has the same bits on any number of ranks).
    """

    model: nn.Module

    def train(self, told: Told) -> None:
        """Train to the end of the case: its epochs, or its `max_steps`. Collective."""


class FurtherMethods(Protocol):
    """Methods that a loop may have. Each lets further claims apply."""

    def evaluate(self) -> Mapping[str, float]:
        """Loss and accuracy over all rows of the case, as the loop reports them: `{"loss": ..., "accuracy": ...}`.

        Called on every rank after the training. A rank that reports nothing returns `{}`; the reports of all other
        ranks are judged.
        """

    def save(self, folder: Path) -> None:
        """Write into `folder`, which exists, all that a resume needs. Called on every rank, between two updates.

        The exact place: the first call of the model after the update, or the end of `train`. A later call of the model
        ends `train` by an exception, as a kill would: without another `save`.
        """

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote, in a new loop. Called before `train`, which continues with the next update."""

    def rate(self, update: int) -> float:
        """The learning rate that `update` (from 1) must have, in closed form; without this method `Case.lr`."""

    def decay(self, name: str) -> float:
        """The weight decay that the model's parameter `name` must have: a rule, not a look at the optimizer.

        Without this method every group decays by `Case.weight_decay`, or not at all.
        """

    def tuned(self, update: int) -> Mapping[str, object]:
        """Other settings of the optimizer than torch's defaults, by torch's names, in every group at `update`.

        For example `{"betas": (0.9, 0.95), "eps": 1e-6}`.
        """

    def loss_sum(self, model: nn.Module, ids: Sequence[int]) -> tuple[Tensor, int]:
        """The sum of the losses of the rows `ids` under `model`, a float64 copy of the loop's own; and their number.

        For a loop that does not train the case's model. The law then comes from this forward pass; the verdict says so.
        """
