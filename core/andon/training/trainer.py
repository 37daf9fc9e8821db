"""Epochs, evaluation, checkpoints and early stopping around the step. The same decisions on every rank.

Every decision here is a function of bits that are equal on all ranks (the step's results, the scores of a gathered
table), so nothing has to be agreed on but what only one rank can know: that it was asked to stop.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from andon.backend.base import Backend
from andon.metrics.scores import Scores
from andon.step.plan import BatchPlan, GlobalBatch
from andon.step.replica import Replica
from andon.step.schedule import WarmupCosine
from andon.step.step import StepResult, TrainingStep


@dataclass(frozen=True)
class Progress:
    """Where a run is: what a checkpoint holds besides tensors."""

    step: int = 0
    best_step: int = 0
    best_loss: float = math.inf
    bad_epochs: int = 0
    last_loss: float = math.nan


@dataclass(frozen=True)
class Outcome:
    """How a run ended: `finished`, `early-stopping` or `preempted`."""

    progress: Progress
    reason: str


class Journal(Protocol):
    """Who writes down what happens. Rank 0's writes files, the others' nothing."""

    def step(self, batch: GlobalBatch, result: StepResult) -> None:
        """One update was done."""
        ...

    def evaluated(self, step: int, epoch: int, scores: Scores, what: str) -> None:
        """Rows were scored after `step` updates."""
        ...

    def checkpoint(self, progress: Progress, *, best: bool) -> None:
        """Write the whole state after `progress.step` updates."""
        ...


@dataclass
class Trainer:
    """Runs the plan from a point on.

    evaluate: scores of the validation rows (None where there are none). stop_asked: whether this process was asked to
    end at the next step boundary. base_digest: of the frozen weights at the start.
    """

    backend: Backend
    replicas: list[Replica]
    step: TrainingStep
    plan: BatchPlan
    schedule: WarmupCosine
    journal: Journal
    evaluate: Callable[[], Scores] | None
    stop_asked: Callable[[], bool]
    base_digest: int
    patience: int | None = None
    checkpoint_every: int | None = None
    evaluate_every: int | None = None
    base_every: int = 50
    _saved_at: int = field(default=-1, init=False)

    def run(self, progress: Progress) -> Outcome:
        """Train from `progress` to the end of the plan, early stopping, or a request to stop."""
        while progress.step < self.plan.total_steps:
            batch = self.plan.batch(progress.step + 1)
            result = self.step(batch, self.schedule.rate(batch.step), batch.step, stop=self.stop_asked())
            progress = replace(progress, step=batch.step, last_loss=result.loss)
            self.journal.step(batch, result)
            progress, best = self._look(batch, progress)
            self._keep(batch.step, progress, best=best, stopping=result.stop)
            if self.patience is not None and progress.bad_epochs >= self.patience:
                return self._end(progress, "early-stopping")
            if result.stop and progress.step < self.plan.total_steps:
                return Outcome(progress, "preempted")
        return self._end(progress, "finished")

    def _look(self, batch: GlobalBatch, progress: Progress) -> tuple[Progress, bool]:
        """Evaluate where it is due; at an epoch's end that also decides what is best and when to give up."""
        epoch_end = self.plan.is_epoch_end(batch.step)
        due = epoch_end or (self.evaluate_every is not None and batch.step % self.evaluate_every == 0)
        if self.evaluate is None or not due:
            return progress, False
        scores = self.evaluate()
        self.journal.evaluated(batch.step, batch.epoch, scores, "validation")
        if not epoch_end or scores.loss is None:
            return progress, False
        if scores.loss < progress.best_loss:
            return replace(progress, best_loss=scores.loss, best_step=batch.step, bad_epochs=0), True
        return replace(progress, bad_epochs=progress.bad_epochs + 1), False

    def _keep(self, step: int, progress: Progress, *, best: bool, stopping: bool) -> None:
        periodic = self.checkpoint_every is not None and step % self.checkpoint_every == 0
        saving = periodic or stopping or self.plan.is_epoch_end(step)
        if saving or step % self.base_every == 0:
            self.step.attest_base(step, self.base_digest)
        if saving:
            self.journal.checkpoint(progress, best=best)
            self._saved_at = step

    def _end(self, progress: Progress, reason: str) -> Outcome:
        if self._saved_at != progress.step:
            self.step.attest_base(progress.step, self.base_digest)
        return Outcome(progress, reason)
