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
    """What was observed on one rank.

    rowless: updates with a forward pass of unknown rows, neither recognised nor reported. leftover: rows of forward
    passes after the last update. weightless: rows that counted for nothing, see `ForwardPasses.settle`. moved: rank 0's
    weights at the first forward pass of an update, if the update before (or the start) left others; the end of the run
    counts as one more update. By rank and update: running, the digest of the running statistics at its first forward
    pass; draws, the state of torch's generator before the first forward pass that drew from it; undrawn, whether the
    model was in training mode in the first one that drew nothing. evaluation: what this rank's evaluation reported;
    around_evaluation: digests of parameters and buffers by name, before and after it. rates, decays, tuned: what the
    loop declares, by update or parameter. claims: what the loop offers, as "evaluates", and says of itself, as "halts".
    poisoned: whether the value that is not finite was planted on this rank.
    """

    made: dict[int, Made] = field(default_factory=dict)
    told_losses: dict[int, float] = field(default_factory=dict)
    strangers: list[Stranger] = field(default_factory=list)
    rowless: list[int] = field(default_factory=list)
    leftover: list[int] = field(default_factory=list)
    weightless: list[int] = field(default_factory=list)
    moved: dict[int, Tensors] = field(default_factory=dict)
    running: dict[tuple[int, int], str] = field(default_factory=dict)
    draws: dict[tuple[int, int], str] = field(default_factory=dict)
    undrawn: dict[tuple[int, int], bool] = field(default_factory=dict)
    evaluation: Mapping[str, float] = field(default_factory=dict)
    around_evaluation: tuple[Mapping[str, str], Mapping[str, str]] = ({}, {})
    rates: dict[int, float] = field(default_factory=dict)
    decays: dict[str, float] = field(default_factory=dict)
    tuned: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    claims: frozenset[str] = frozenset()
    sharded: bool = False
    recomputed: dict[int, RowGradients] = field(default_factory=dict)
    poisoned: bool = False
    updates: int = 0


def first_of(trace: Trace) -> LoopSightings:
    """What rank 0 shows. Raises `TypeError` for the trace of another kind of subject."""
    if not isinstance(trace.first, LoopSightings):
        raise TypeError(f"{trace.seen.name} is not the trace of a loop")
    return trace.first
