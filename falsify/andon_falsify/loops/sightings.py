"""What was seen of a foreign loop on one rank, beyond what is seen of our own trainer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from andon_falsify.reference.training import RowGradients
from andon_falsify.subjects.trace import Sightings, Tensors, Trace


@dataclass(frozen=True)
class Group:
    """A parameter group of the optimizer at an update: the names of its parameters, and its settings."""

    names: tuple[str, ...]
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Made:
    """One update: the optimizer's class and groups, and the norm that torch's clip was given (None: not called).

    early: something else than what was clipped came to the optimizer, as where ranks clip before they reduce.
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
    """What a forward pass of update `step` was given that is no row of the case."""

    step: int
    rank: int
    text: str


@dataclass
class LoopSightings(Sightings):
    """What was seen in the process of one rank. `claims` names what the loop offers or says of itself."""

    made: dict[int, Made] = field(default_factory=dict)
    told_losses: dict[int, float] = field(default_factory=dict)
    strangers: list[Stranger] = field(default_factory=list)
    rowless: list[int] = field(default_factory=list)
    """Updates with a forward pass whose rows could be neither recognised nor were told."""
    leftover: list[int] = field(default_factory=list)
    """Rows of forward passes after the last update."""
    weightless: list[int] = field(default_factory=list)
    """Rows of forward passes that counted for nothing, and are no visits; see `weighing`."""
    moved: dict[int, Tensors] = field(default_factory=dict)
    """Rank 0's weights before an update where they are not those behind the step before; behind the last, at the end.

    Of the first update, where they are not those that the run was described with.
    """
    running: dict[tuple[int, int], str] = field(default_factory=dict)
    """Digest of the running statistics by rank and update, before its first forward pass, where there are any."""
    draws: dict[tuple[int, int], str] = field(default_factory=dict)
    """By rank and update: the state of torch's generator before the first forward pass that drew from it."""
    undrawn: dict[tuple[int, int], bool] = field(default_factory=dict)
    """By rank and update: of the first forward pass with rows that drew nothing, whether it was in training mode."""
    evaluated: list[int] = field(default_factory=list)
    evaluation: Mapping[str, float] = field(default_factory=dict)
    """What this rank's evaluation reported; empty where it reported nothing."""
    around_evaluation: tuple[Mapping[str, str], Mapping[str, str]] = ({}, {})
    """Digests of the model's parameters and buffers by name, before and after the evaluation."""
    rates: dict[int, float] = field(default_factory=dict)
    """The declared learning rate of each update."""
    decays: dict[str, float] = field(default_factory=dict)
    """The declared weight decay of each trained parameter."""
    tuned: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    """What the loop declares of its optimizer besides, by update and torch's names of settings."""
    claims: frozenset[str] = frozenset()
    sharded: bool = False
    recomputed: dict[int, RowGradients] = field(default_factory=dict)
    poisoned: bool = False
    """Whether the planted value was really planted on this rank."""
    updates: int = 0


def first_of(trace: Trace) -> LoopSightings:
    """What the process of rank 0 saw. Raises `TypeError` for the trace of another kind of subject."""
    if not isinstance(trace.first, LoopSightings):
        msg = f"{trace.seen.name} is no trace of a loop"
        raise TypeError(msg)
    return trace.first
