"""Epochs, evaluation, checkpoints and early stopping around the step. The same decisions on every rank.

Every decision here is a function of bits that are equal on all ranks (the step's results, the scores of a gathered
table), so nothing has to be agreed on but what only one rank can know: that it was asked to stop, that its clock says
that a checkpoint is due, and that it could not write a checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Protocol

import torch

from andon.backend.base import Backend
from andon.config.schema import Config
from andon.console.problems import InputError
from andon.metrics.scores import Scores
from andon.run.repeats import Repeats
from andon.step.plan import BatchPlan, GlobalBatch, Schedule
from andon.step.step import Pending, RankFailed, StepResult, TrainingStep
from andon.training.history import step_record
from andon_contracts.laws.law import Judgement, enforce
from andon_contracts.laws.update import RESTORED, Restored
from andon_contracts.liveness.diagnosis import UPDATE, StepClock
from andon_contracts.record import Step
from andon_contracts.violation import Violation


@dataclass(frozen=True)
class Progress:
    """Where a run is: what a checkpoint holds besides tensors.

    best_weights: the digest of the weights after `best_step`; 0 if contracts were off there. bad_evaluations: the
    number of evaluations since then, none of which had a lower validation loss.
    """

    step: int = 0
    best_step: int = 0
    best_loss: float = math.inf
    best_weights: int = 0
    bad_evaluations: int = 0
    last_loss: float = math.nan


@dataclass(frozen=True)
class Outcome:
    """How a run ended: `finished`, `early-stopping` or `preempted`."""

    progress: Progress
    reason: str


class Journal(Protocol):
    """Who writes down what happens. Rank 0's writes files, the others' nothing."""

    def step(self, batch: GlobalBatch, result: StepResult, record: Step) -> None:
        """One update was done; `record` is what the ledger says of it."""
        ...

    def evaluated(self, step: int, epoch: int, scores: Scores, what: str) -> None:
        """Rows were scored after `step` updates."""
        ...

    def checkpoint(self, progress: Progress, *, best: bool) -> None:
        """Write the whole state after `progress.step` updates. best: they left the lowest validation loss so far."""
        ...

    def close(self) -> None:
        """Give back what is held; more than once is harmless."""
        ...


_WAIT = 19
"""Rank 0 waits this many times as long as the last checkpoint took, so that saving by time takes at most 5 %."""
_WRITTEN, _REFUSED, _BROKEN = 0, 1, 2
"""What became of a checkpoint on the rank that writes it."""


@dataclass
class Trainer:
    """Runs the plan from a point on.

    evaluate: scores of the validation rows (None where there are none). stop_asked: whether this process was asked to
    end at the next step boundary. base_digest: of the frozen weights at the start. repeats: steps done before, which
    must be repeated exactly. progress, weights: where the run is, and the digest of the weights there; both are of the
    last step that held, whatever happens in the next. clock: told where the run is.
    """

    backend: Backend
    step: TrainingStep
    plan: BatchPlan
    schedule: Schedule
    journal: Journal
    evaluate: Callable[[], Scores] | None
    stop_asked: Callable[[], bool]
    base_digest: int
    repeats: Repeats
    progress: Progress
    weights: int
    config: Config
    clock: StepClock
    _saved_at: int = field(default=-1, init=False)
    _due_at: float = field(default=math.inf, init=False)
    _under_way: list[tuple[GlobalBatch, Pending]] = field(default_factory=list, init=False)

    def run(self) -> Outcome:
        """Train from `progress` to the end of the plan, early stopping, or a request to stop.

        Raises `Violation` on every rank alike, `InputError` on a rank whose disk refuses (`RankFailed` on the others).
        """
        stop = False
        self._schedule_save(0.0)
        for step in range(self.progress.step + 1, self.plan.total_steps + 1):
            if self._gives_up():
                return self._end("early-stopping")
            if stop:
                return Outcome(self.progress, "preempted")
            stop = self._advance(self.plan.batch(step))
        return self._end("finished")

    def _advance(self, batch: GlobalBatch) -> bool:
        """One update and what belongs to it; whether any rank was asked to stop.

        Where updates are judged late, this one is launched before the last is settled, unless something is due after
        it that has to see the weights as it leaves them.
        """
        self.clock.at(batch.step, UPDATE)
        # Signals and clocks differ between ranks, so the update's message carries each rank's requests to all.
        rate, asked = self.schedule.rate(batch.step), {"stop": self.stop_asked(), "save": monotonic() >= self._due_at}
        if not self.step.late:
            result = self.step(batch, rate, batch.step, **asked)
            self._settle(batch, result, stopping=result.stop, saving=result.save)
            return result.stop
        self._under_way.append((batch, self.step.launch(batch, rate, batch.step, **asked)))
        stop = save = False
        while len(self._under_way) > (0 if stop or save or self._due(batch.step) else 1):
            settled, pending = self._under_way.pop(0)
            result = pending.result()
            stop, save, last = stop or result.stop, save or result.save, not self._under_way
            self._settle(settled, result, stopping=stop and last, saving=save and last)
        return stop

    def _schedule_save(self, took: float) -> None:
        """Rank 0 wants the next checkpoint after `save_s`, or later if the last one, of `took` seconds, was slow."""
        minutes = self.config.training.checkpoint_minutes
        if minutes is not None and self.backend.ranks[0] == 0:
            self._due_at = monotonic() + max(60 * minutes, _WAIT * took)

    def _gives_up(self) -> bool:
        patience = self.config.training.early_stopping_patience
        return patience is not None and self.progress.bad_evaluations >= patience

    def _settle(self, batch: GlobalBatch, result: StepResult, *, stopping: bool, saving: bool) -> None:
        """Write down an update that held, and do what is due after it. stopping: the run ends. saving: a rank asks."""
        record = step_record(batch, result, self.backend.world_size, self.backend.name)
        # Before it is written: of one step the ledger must not have two results.
        self.repeats.judge(record)
        self.progress = replace(self.progress, step=batch.step, last_loss=result.loss)
        self.weights = result.digests.get("weights", self.weights)
        self.journal.step(batch, result, record)
        best, every, began = self._look(batch, result), self.config.training.checkpoint_every, monotonic()
        saving = saving or stopping or best or self._gives_up() or self.plan.is_epoch_end(batch.step)
        saving = saving or (every is not None and batch.step % every == 0)
        # What is frozen is too large to be read at each update, but no checkpoint vouches for it unread.
        if saving or batch.step % self.config.contracts.base_every == 0:
            self.step.attest_base(batch.step, self.base_digest)
        if saving:
            self._save(best=best)
            self._saved_at = batch.step
            self._schedule_save(monotonic() - began)

    def _due(self, step: int) -> bool:
        training = self.config.training
        regular = (self.config.contracts.base_every, training.checkpoint_every, training.evaluate_every)
        return self.plan.is_epoch_end(step) or any(every is not None and step % every == 0 for every in regular)

    def _look(self, batch: GlobalBatch, result: StepResult) -> bool:
        """Evaluate if it is due. The validation loss decides what is best (returned) and when to give up."""
        every = self.config.training.evaluate_every
        due = self.plan.is_epoch_end(batch.step) or (every is not None and batch.step % every == 0)
        if self.evaluate is None or not due:
            return False
        self.clock.at(batch.step, "evaluation")
        scores = self.evaluate()
        self.journal.evaluated(batch.step, batch.epoch, scores, "validation")
        if scores.loss is None:
            return False
        if scores.loss < self.progress.best_loss:
            weights = result.digests.get("weights", 0)
            self.progress = replace(
                self.progress, best_step=batch.step, best_loss=scores.loss, best_weights=weights, bad_evaluations=0
            )
            return True
        self.progress = replace(self.progress, bad_evaluations=self.progress.bad_evaluations + 1)
        return False

    def _save(self, *, best: bool) -> None:
        """Have the checkpoint written, and tell every rank what became of it: all go on or none does."""
        error: InputError | Violation | None = None
        self.clock.at(self.progress.step, "checkpoint")
        try:
            self.journal.checkpoint(self.progress, best=best)
        except (InputError, Violation) as refused:
            error = refused
        outcome = _WRITTEN if error is None else _BROKEN if isinstance(error, Violation) else _REFUSED
        # Also where this rank is about to raise: the others would wait for it in the next update.
        outcomes = self.backend.gather([torch.tensor([outcome], device=device) for device in self.backend.devices])
        if error is not None:
            raise error
        for rank, what in enumerate(map(int, outcomes)):
            if what == _BROKEN:
                seen = f"rank {rank} did not read back what it wrote"
                enforce(Judgement(RESTORED, Restored({}, {}, self.progress.step, seen, (rank,))))
            if what == _REFUSED:
                msg = f"rank {rank} could not write the checkpoint of step {self.progress.step}"
                raise RankFailed(msg)

    def _end(self, reason: str) -> Outcome:
        self.clock.at(self.progress.step, "end")
        if self._saved_at != self.progress.step:
            self.step.attest_base(self.progress.step, self.base_digest)
        return Outcome(self.progress, reason)
