"""One update from its launch to its result."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from andon.step.plan import GlobalBatch
from andon.step.readings import Readings
from andon.step.tree import fold
from andon_contracts.laws.rows import LeafPlan, LeafReport

UNSIGNED = 1 << 64


@dataclass(frozen=True)
class StepResult:
    """What one update did. Reals are exact: equal bits on every backend and world size."""

    step: int
    rows: int
    loss: float
    grad_norm: float
    rate: float
    correct: int
    digests: Mapping[str, int]
    """content, gradient, weights, optimizer; empty where the contracts are off."""
    leaves: tuple[LeafReport, ...]
    ranks: tuple[Mapping[str, int], ...]
    """By rank: its digests, as it saw them."""
    stop: bool = False
    """Whether any rank was asked to stop after this update; all ranks know it alike."""


@dataclass
class Course:
    """One update under way: what it is to be, and what has been read of it so far."""

    batch: GlobalBatch
    rate: float
    updates: int
    checked: bool
    readings: Readings
    plan: tuple[LeafPlan, ...] = ()
    reports: tuple[LeafReport, ...] = ()
    stop: bool = False
    norm: float = 0.0
    gradients: tuple[int, ...] = ()
    ranks: tuple[Mapping[str, int], ...] = ()
    reported: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def rows(self) -> int:
        """Rows of the global batch as it was planned."""
        return sum(len(leaf.ids) for leaf in self.plan)

    def result(self) -> StepResult:
        """What the update did, once everything has been read."""
        content = sum(leaf.content for leaf in self.plan) % UNSIGNED
        return StepResult(
            step=self.batch.step,
            rows=self.rows,
            loss=_tree_sum([report.loss_sum for report in self.reports]) / max(self.rows, 1),
            grad_norm=self.norm,
            rate=self.rate,
            correct=sum(report.correct for report in self.reports),
            digests={"content": content, **self.ranks[0]} if self.ranks else {},
            leaves=self.reports,
            ranks=self.ranks,
            stop=self.stop,
        )


class Pending:
    """An update that was launched. `result` says what it did, once; until then the next one may be launched."""

    def __init__(self, course: Course) -> None:
        self._course = course

    def result(self) -> StepResult:
        """Wait for the update and judge it.

        Raises `Violation` on every rank alike, `RankFailed` where another rank raised, and a rank's own error there.
        """
        self._course.readings.settle()
        return self._course.result()


def _tree_sum(values: Sequence[float]) -> float:
    """The sum of the micro-batches' losses along the same tree as their gradients."""
    total: float = fold((0, len(values)), values.__getitem__, operator.add, float)
    return total
