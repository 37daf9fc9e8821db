"""What one rank of a loop shows, beyond what a rank of our own trainer shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from andon_falsify.reference.training import RowGradients
from andon_falsify.subjects.trace import Observations, Tensors, Trace


@dataclass(frozen=True)
class Group:
    """A parameter group of the optimizer at an update: the names of its parameters, and its settings."""

    names: tuple[str, ...]
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Made:
    """One update: the optimizer's class and groups. norm: as torch's clip received it, None if it was not called.

    early: the optimizer received another gradient than the clipped one. Ranks that clip before they reduce do that.
    """

    optimizer: str
    groups: tuple[Group, ...]
    norm: float | None
    clipped: bool
    early: bool = False

    @property
    def rate(self) -> float:
        """The learning rate of the first group."""
        return self.rates[0]

    @property
    def rates(self) -> tuple[float, ...]:
        """The learning rate of every group."""
        return tuple(float(group.settings["lr"]) for group in self.groups)


@dataclass(frozen=True)
class Stranger:
    """A row in a forward pass of update `step` that the case does not have. text: describes it."""

    step: int
    rank: int
    text: str


@dataclass
class LoopSightings(Observations):
    """What was observed on one rank. claims: what the loop offers, as "evaluates", and says of itself, as "halts"."""

    made: dict[int, Made] = field(default_factory=dict)
    told_losses: dict[int, float] = field(default_factory=dict)
    strangers: list[Stranger] = field(default_factory=list)
    rowless: list[int] = field(default_factory=list)
    """Updates with a forward pass of unknown rows: neither recognised nor reported."""
    leftover: list[int] = field(default_factory=list)
    """Rows of forward passes after the last update."""
    weightless: list[int] = field(default_factory=list)
    """Rows that counted for nothing, so that their forward passes are no visits; see `ForwardPasses.settle`."""
    moved: dict[int, Tensors] = field(default_factory=dict)
    """Rank 0's weights at the first forward pass of an update, if the update before left others.

    For the first update: if they differ from those at the start. The end of the run counts as one more update.
    """
    running: dict[tuple[int, int], str] = field(default_factory=dict)
    """Digest of the running statistics, by rank and update, at its first forward pass."""
    draws: dict[tuple[int, int], str] = field(default_factory=dict)
    """By rank and update: the state of torch's generator before the first forward pass that drew from it."""
    undrawn: dict[tuple[int, int], bool] = field(default_factory=dict)
    """By rank and update: whether the model was in training mode in the first forward pass that drew nothing."""
    evaluation: Mapping[str, float] = field(default_factory=dict)
    """What this rank's evaluation reported, if anything."""
    around_evaluation: tuple[Mapping[str, str], Mapping[str, str]] = ({}, {})
    """Digests of the model's parameters and buffers by name, before and after the evaluation."""
    rates: dict[int, float] = field(default_factory=dict)
    """The declared learning rate of each update."""
    decays: dict[str, float] = field(default_factory=dict)
    """The declared weight decay of each trained parameter."""
    tuned: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    """The declared settings of the optimizer at each update, by torch's names."""
    claims: frozenset[str] = frozenset()
    sharded: bool = False
    recomputed: dict[int, RowGradients] = field(default_factory=dict)
    poisoned: bool = False
    """Whether the value that is not finite was planted on this rank."""
    updates: int = 0


def first_of(trace: Trace) -> LoopSightings:
    """What rank 0 shows. Raises `TypeError` for the trace of another kind of subject."""
    if not isinstance(trace.first, LoopSightings):
        raise TypeError(f"{trace.seen.name} is not the trace of a loop")
    return trace.first
