"""Epochs, evaluation, checkpoints and early stopping around the step. The same decisions on every rank.

Every decision is a function of bits that are equal on all ranks: the results of a step, the scores of a gathered table.
Ranks only exchange what a single rank can know: a request to stop, a checkpoint that is due by rank 0's clock, and a
checkpoint that could not be written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic

import torch
from torch import nn

from andon.backend.base import Backend
from andon.console.problems import InputError
from andon.metrics.scores import Scores
from andon.model.batches import EvaluationBatching
from andon.run.repeats import Repeats
from andon.step.plan import GlobalBatch
from andon.step.replica import Replica
from andon.step.step import Pending, RankFailed, StepResult
from andon.tasks.text import ScoredTask
from andon.training.build import Run
from andon.training.history import step_record
from andon_contracts.laws.law import Judgement, enforce
from andon_contracts.laws.update import EVALUATED, OUTPUT, RESTORED, Evaluation, Output, Restored
from andon_contracts.liveness.diagnosis import UPDATE, StepClock
from andon_contracts.record import Step
from andon_contracts.violation import Violation

_WAIT = 19
"""Rank 0 waits this many times as long as the last checkpoint took, so that saving by time takes at most 5 %."""
_WRITTEN, _REFUSED, _BROKEN = 0, 1, 2
"""What became of a checkpoint on the rank that writes it."""


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


class Journal:
    """Records what happens in a run. This one records nothing: rank 0 alone writes files (`journal.FolderJournal`)."""

    def step(self, batch: GlobalBatch, result: StepResult, record: Step) -> None:
        """Record an update; `record` is its line of the ledger."""

    def evaluated(self, step: int, epoch: int, scores: Scores, what: str) -> None:
        """Record scores after `step` updates."""

    def checkpoint(self, progress: Progress, *, best: bool) -> None:
        """Save the whole state. best: it has the lowest validation loss so far."""

    def close(self) -> None:
        """Release files. More than one call is harmless."""


@dataclass
class Trainer:
    """Trains `parts` from `progress`, the state that its replicas are in, to the end of the plan.

    repeats: steps done before, which must be repeated exactly. evaluate: scores the validation rows; None if there are
    none. stop_asked: whether this process was asked to end at the next step boundary. clock: is told where the run is.
    progress, weights: where the run is and the digest of the weights there, after the last step that held.
    """

    parts: Run
    journal: Journal
    progress: Progress
    repeats: Repeats
    evaluate: Callable[[], Scores] | None = None
    stop_asked: Callable[[], bool] = lambda: False
    clock: StepClock = field(default_factory=StepClock)
    weights: int = field(init=False)
    _saved_at: int = field(default=-1, init=False)
    _due_at: float = field(default=math.inf, init=False)
    _under_way: list[tuple[GlobalBatch, Pending]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.weights = self.parts.primary.weights_digest()

    def run(self) -> str:
        """Train from `progress` on, and return why that ended: `finished`, `early-stopping` or `preempted`.

        Raises `Violation` on every rank alike, `InputError` on a rank whose disk refuses (`RankFailed` on the others).
        """
        stop, reason = False, "finished"
        self._schedule_save(0.0)
        for step in range(self.progress.step + 1, self.parts.plan.total_steps + 1):
            if self._gives_up():
                reason = "early-stopping"
                break
            if stop:
                return "preempted"
            stop = self._advance(self.parts.plan.batch(step))
        self.clock.at(self.progress.step, "end")
        if self._saved_at != self.progress.step:
            self.parts.step.attest_base(self.progress.step, self.parts.base)
        return reason

    def _advance(self, batch: GlobalBatch) -> bool:
        """Do one update and what is due after it; returns whether a rank was asked to stop.

        If updates are judged late, this update is launched before the last one is settled, unless something is due
        after it that needs the weights as it leaves them.
        """
        self.clock.at(batch.step, UPDATE)
        # Signals and clocks differ between ranks, so the update's message carries each rank's requests to all.
        asked = {"stop": self.stop_asked(), "save": monotonic() >= self._due_at}
        rate, run_step = self.parts.schedule.rate(batch.step), self.parts.step
        if not run_step.late:
            result = run_step(batch, rate, batch.step, **asked)
            self._settle(batch, result, stopping=result.stop, saving=result.save)
            return result.stop
        self._under_way.append((batch, run_step.launch(batch, rate, batch.step, **asked)))
        training, stop, save = self.parts.config.training, False, False
        regular = (self.parts.config.contracts.base_every, training.checkpoint_every, training.evaluate_every)
        due = any(self._is_due(batch.step, every) for every in regular)
        while len(self._under_way) > (0 if stop or save or due else 1):
            settled, pending = self._under_way.pop(0)
            result = pending.result()
            stop, save, last = stop or result.stop, save or result.save, not self._under_way
            self._settle(settled, result, stopping=stop and last, saving=save and last)
        return stop

    def _is_due(self, step: int, every: int | None) -> bool:
        return self.parts.plan.is_epoch_end(step) or (every is not None and step % every == 0)

    def _schedule_save(self, took: float) -> None:
        """Rank 0 wants the next checkpoint after the configured time, or later if the last took long (`took` s)."""
        minutes = self.parts.config.training.checkpoint_minutes
        if minutes is not None and self.parts.backend.ranks[0] == 0:
            self._due_at = monotonic() + max(60 * minutes, _WAIT * took)

    def _gives_up(self) -> bool:
        patience = self.parts.config.training.early_stopping_patience
        return patience is not None and self.progress.bad_evaluations >= patience

    def _settle(self, batch: GlobalBatch, result: StepResult, *, stopping: bool, saving: bool) -> None:
        """Record an update that held, and do what is due after it. stopping: the run ends. saving: a rank asks."""
        step, backend, training = batch.step, self.parts.backend, self.parts.config.training
        record = step_record(batch, result, backend.world_size, backend.name)
        self.repeats.judge(record)  # before it is written: the ledger must not have two results of one step
        self.progress = replace(self.progress, step=step, last_loss=result.loss)
        self.weights = result.digests.get("weights", self.weights)
        self.journal.step(batch, result, record)
        best = False
        if self.evaluate is not None and self._is_due(step, training.evaluate_every):
            self.clock.at(step, "evaluation")
            scores = self.evaluate()
            self.journal.evaluated(step, batch.epoch, scores, "validation")
            done, loss = self.progress, scores.loss
            if loss is not None and loss < done.best_loss:
                best, weights = True, result.digests.get("weights", 0)
                self.progress = replace(done, best_step=step, best_loss=loss, best_weights=weights, bad_evaluations=0)
            elif loss is not None:
                self.progress = replace(done, bad_evaluations=done.bad_evaluations + 1)
        began = monotonic()
        saving = saving or stopping or best or self._gives_up() or self._is_due(step, training.checkpoint_every)
        # Frozen weights are too large to be read at each update, but no checkpoint vouches for them unread.
        if saving or step % self.parts.config.contracts.base_every == 0:
            self.parts.step.attest_base(step, self.parts.base)
        if saving:
            self._save(best=best)
            self._saved_at = step
            self._schedule_save(monotonic() - began)

    def _save(self, *, best: bool) -> None:
        """Have the checkpoint written, and tell every rank what became of it: all go on or none does."""
        error: InputError | Violation | None = None
        self.clock.at(self.progress.step, "checkpoint")
        try:
            self.journal.checkpoint(self.progress, best=best)
        except (InputError, Violation) as refused:
            error = refused
        outcome = _WRITTEN if error is None else _BROKEN if isinstance(error, Violation) else _REFUSED
        # Also if this rank is about to raise: the others would wait for it in the next update.
        backend = self.parts.backend
        outcomes = backend.gather([torch.tensor([outcome], device=device) for device in backend.devices])
        if error is not None:
            raise error
        for rank, what in enumerate(map(int, outcomes)):
            if what == _BROKEN:
                seen = f"rank {rank} did not read back what it wrote"
                enforce(Judgement(RESTORED, Restored({}, {}, self.progress.step, seen, (rank,))))
            if what == _REFUSED:
                raise RankFailed(f"rank {rank} could not write the checkpoint of step {self.progress.step}")


@dataclass
class Evaluator:
    """Scores rows. Caches the last and the best evaluation, so that repeating one needs no forward pass.

    The key is the count of updates, which is equal on all ranks. With a digest of weights, a rank with damaged weights
    would wait alone in a gather.
    """

    backend: Backend
    replicas: Sequence[Replica]
    batching: EvaluationBatching
    _known: dict[tuple[int, int, tuple[int, ...]], Scores] = field(default_factory=dict)

    def __call__(self, task: ScoredTask, ids: Sequence[int], after: int | None = None) -> Scores:
        """Scores as `evaluate` gives them. after: how many updates the weights have; None: as many as were made."""
        key = (self.replicas[0].updates if after is None else after, id(task), tuple(ids))
        if key not in self._known:
            best = sorted(self._known.items(), key=lambda known: math.inf if known[1].loss is None else known[1].loss)
            models = [replica.model for replica in self.replicas]
            self._known = dict(best[:1]) | {key: evaluate(self.backend, models, task, ids, self.batching)}
        return self._known[key]


def evaluate(
    backend: Backend,
    models: Sequence[nn.Module],
    task: ScoredTask,
    ids: Sequence[int],
    batching: EvaluationBatching | None = None,
) -> Scores:
    """Scores of the rows `ids` by the replicas' `models`, exactly the same on any number of ranks.

    Each rank evaluates whole batches. The raw outputs are gathered, and every rank scores the same table. Raises
    `Violation` if that does not have each row once, in order, or is scored otherwise (`evaluation-once`), or is not
    finite (`finite`).
    """
    batches = (batching or EvaluationBatching()).of(task.lengths[list(ids)].tolist())
    # In turns, since the batches are sorted by length.
    owned = [batches[rank :: backend.world_size] for rank in range(backend.world_size)]
    most = max(sum(map(len, each)) for each in owned)

    def outputs_of(index: int) -> torch.Tensor:
        device = backend.devices[index]
        # Padded with -1, since all ranks send one length to a collective. fp64 holds ids and fp32 outputs exactly.
        table = torch.full((most, 1 + task.width), -1.0, dtype=torch.float64, device=device)
        row = 0
        for batch in owned[backend.ranks[index]]:
            rows = [ids[place] for place in batch]
            table[row : row + len(rows), 0] = torch.tensor(rows, dtype=torch.float64, device=device)
            table[row : row + len(rows), 1:] = task.outputs(models[index], task.load(rows, device)).double()
            row += len(rows)
        return table

    table = torch.cat([part.cpu() for part in backend.gather(backend.map(outputs_of))])
    table = table[table[:, 0] >= 0]
    places = torch.tensor([place for each in owned for batch in each for place in batch], dtype=torch.int64)
    if len(table) == len(places):  # a table with more or fewer rows goes to the contract as it came
        table = table[places.argsort()]
    row_ids, outputs = [int(value) for value in table[:, 0].tolist()], table[:, 1:]
    evaluation = Evaluation(0, (tuple(row_ids),), len(ids), {}, {}, planned=tuple(ids))
    enforce(Judgement(EVALUATED, evaluation))
    finite = outputs.isfinite().all(dim=1).tolist()
    odd = tuple(row for row, whole in zip(row_ids, finite, strict=True) if not whole)
    enforce(Judgement(OUTPUT, Output(task.output, len(row_ids), odd)))
    result = task.score(row_ids, outputs)
    counted = {"rows": float(len(ids))}
    enforce(Judgement(EVALUATED, replace(evaluation, reported={"rows": [float(result.rows)]}, counted=counted)))
    return result
