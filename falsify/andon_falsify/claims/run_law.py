"""The law of a run, the same of our trainer and of anyone's loop: what its updates must be, in one process and float64.

Everything starts again at every update from the weights that the accused had then, so that an error is charged to the
update that made it. `trainer_law` and `loop_law` say which rows an update has, and how its optimizer steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import hypot

import torch
from torch import Tensor

from andon_falsify.reference.decoder import Decoder
from andon_falsify.reference.encoder import Encoder
from andon_falsify.reference.params import Lora, canonical, canonical_name
from andon_falsify.reference.training import Piece, RowGradients
from andon_falsify.reference.update import UpdateRule, global_norm
from andon_falsify.subjects.case import PAD, Rows
from andon_falsify.subjects.trace import Tensors, Trace


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


def mean_of(step: int, rows: RowGradients) -> Expected:
    """The law of `step`: loss and gradient are means over its rows, each of which counts once."""
    gradients = {name: tensor.mean(0) for name, tensor in rows.gradients.items()}
    summed = hypot(*(float(part.flatten(1).norm(dim=1).sum()) for part in rows.gradients.values()))
    return Expected(step, float(rows.losses.mean()), gradients, global_norm(gradients), summed / len(rows.rows))


@dataclass(frozen=True)
class Stepping:
    """A group of tensors that one rule moves at one rate."""

    names: tuple[str, ...]
    rule: UpdateRule
    rate: float


class RunLaw(ABC):
    """The law of the updates of one run. Tensors are in float64, under canonical names."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.case = trace.case
        weights = trace.case.class_weights
        self.class_weights = None if weights is None else torch.tensor(weights).double()

    @property
    @abstractmethod
    def why_not(self) -> str:
        """Why no gradient can be computed, "" if it can."""

    @property
    @abstractmethod
    def why_no_update(self) -> str:
        """Why the weights after an update cannot be computed, "" if they can."""

    @property
    @abstractmethod
    def factors(self) -> Mapping[str, int]:
        """What a wrong ratio is explained by."""

    @property
    @abstractmethod
    def expected(self) -> tuple[Expected, ...]:
        """The law of each of `updates`, as far as some row was trained on."""

    @abstractmethod
    def optimizer(self, step: int) -> str:
        """What messages call the optimizer of `step`."""

    @abstractmethod
    def groups(self, step: int) -> tuple[Stepping, ...]:
        """How `step` moves the weights."""

    def limit(self, step: int) -> float | None:
        """The norm to which the seen gradient of `step` is clipped before the optimizer has it; None for none."""
        del step
        return self.case.clip_norm

    @property
    def updates(self) -> tuple[int, ...]:
        """The updates of which gradients and weights are known."""
        return tuple(step for step, values in sorted(self.trace.first.values.items()) if values.weights)

    @cached_property
    def model(self) -> Decoder | Encoder:
        """The architecture of the case."""
        lora = Lora(2.0 * self.case.rank) if self.case.rank else None
        kind = Decoder if self.case.architecture == "decoder" else Encoder
        return kind.from_config(self.trace.first.config, lora)

    @cached_property
    def initial(self) -> dict[str, Tensor]:
        """Rank 0's weights before the first update."""
        return canonical(self.trace.first.state)

    @cached_property
    def trainable(self) -> tuple[str, ...]:
        """What trains."""
        return tuple(short_name(name) for name, _, _ in self.trace.first.layouts[0])

    def before(self, step: int) -> dict[str, Tensor]:
        """Rank 0's weights before `step`, what does not train included."""
        return self.initial if step == 1 else self.initial | self.after(step - 1)

    def after(self, step: int) -> dict[str, Tensor]:
        """Rank 0's trained weights right after `step`."""
        return _exact(self.trace.first.values[step].weights)

    def given(self, step: int) -> dict[str, Tensor]:
        """Rank 0's gradient of `step` before clipping, without what was not set."""
        return _exact(self.trace.first.values[step].gradients)

    def seen(self, step: int) -> dict[str, Tensor]:
        """The same of all that trains; one that was not set is 0."""
        held = self.given(step)
        return {name: held.get(name, torch.zeros_like(tensor)) for name, tensor in self.after(step).items()}


def _exact(tensors: Tensors) -> dict[str, Tensor]:
    return {short_name(name): tensor.double() for name, tensor in tensors.items()}


def short_name(name: str) -> str:
    """The canonical name of a trained tensor."""
    short = canonical_name(name)
    assert short is not None, name
    return short


def piece_of(rows: Rows, ids: tuple[int, ...], length: int = 0) -> Piece:
    """The rows `ids`, padded on the right to `length`, by default that of the longest."""
    length = length or max((len(rows.tokens[row]) for row in ids), default=1)
    tokens = torch.full((len(ids), length), PAD, dtype=torch.int64)
    attention = torch.zeros(len(ids), length, dtype=torch.int64)
    for place, row in enumerate(ids):
        own = rows.tokens[row]
        tokens[place, : len(own)] = torch.tensor(own)
        attention[place, : len(own)] = 1
    return Piece(tokens, attention, torch.tensor([rows.labels[row] for row in ids], dtype=torch.int64))
