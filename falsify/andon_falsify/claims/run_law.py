"""What the claims on gradients, losses and updates ask of a reference: the same of our trainer and of anyone's loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from andon_falsify.reference.update import Law
from andon_falsify.subjects.case import Case
from andon_falsify.subjects.trace import Trace


@dataclass(frozen=True)
class Expected:
    """The law of one update, from the weights that the accused had before it.

    norm: of its gradient, before any clipping. summed: the norm that the gradient would have if no row's part cancelled
    another's: what fp32 rounds is that.
    """

    step: int
    loss: float
    gradients: Mapping[str, Tensor]
    norm: float
    summed: float


@dataclass(frozen=True)
class Stepping:
    """A group of tensors that one law moves at one rate."""

    names: tuple[str, ...]
    law: Law
    rate: float


class RunLaw(Protocol):
    """The law of the updates of one run. Tensors are in float64, under canonical names."""

    trace: Trace
    case: Case

    @property
    def why_not(self) -> str:
        """Why no gradient can be computed, "" if it can."""
        ...

    @property
    def why_no_update(self) -> str:
        """Why the weights after an update cannot be computed, "" if they can."""
        ...

    @property
    def factors(self) -> Mapping[str, int]:
        """What a wrong ratio is explained by."""
        ...

    @property
    def updates(self) -> tuple[int, ...]:
        """The updates of which gradients and weights are known."""
        ...

    def laws(self) -> Iterator[Expected]:
        """The law of each of these, as far as some row was trained on."""
        ...

    def seen(self, step: int) -> Mapping[str, Tensor]:
        """Rank 0's gradient before clipping."""
        ...

    def given(self, step: int) -> Mapping[str, Tensor]:
        """The same, without those that were not set."""
        ...

    def before(self, step: int) -> Mapping[str, Tensor]:
        """Rank 0's weights before `step`, what does not train included."""
        ...

    def after(self, step: int) -> Mapping[str, Tensor]:
        """Rank 0's trained weights right after it."""
        ...

    def optimizer(self, step: int) -> str:
        """What messages call the optimizer of `step`."""
        ...

    def groups(self, step: int) -> tuple[Stepping, ...]:
        """How `step` moves the weights."""
        ...

    def limit(self, step: int) -> float | None:
        """The norm to which the seen gradient of `step` is clipped before the optimizer has it; None for none."""
        ...
