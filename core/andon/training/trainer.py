"""The training loop: epochs, evaluation, checkpoints and early stopping. All ranks make the same decisions.

Decisions depend on bits that are equal on all ranks: results of a step, scores of a gathered table. Ranks exchange only
what a single rank knows: a request to stop, a checkpoint that is due by rank 0's clock, a failure to write one.

Every rank reads the same ledger and compares repeated steps with it, so if a step does not repeat exactly, all ranks
end with the same error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic

import torch
from torch import nn

from andon.backend.base import Backend
from andon.console.messages import InputError, command_line
from andon.metrics.scores import Scores
from andon.model.masks import EvaluationBatching
from andon.run.checkpoint import Checkpoint
from andon.run.ledger import UNKNOWN, LedgerError, Repeats, digested_ledger
from andon.step.plan import GlobalBatch
from andon.step.replica import Replica
from andon.step.step import Pending, RankFailed, StepResult
from andon.tasks.text import ScoredTask
from andon.training.build import Run
from andon_contracts.digest import hex64
from andon_contracts.fields import Real
from andon_contracts.laws.law import Judgement, enforce
from andon_contracts.laws.update import EVALUATED, OUTPUT, RESTORED, Output, Restored
from andon_contracts.laws.update import Evaluation as Scored
from andon_contracts.liveness.diagnosis import UPDATE, StepClock
from andon_contracts.record import (
    GENESIS,
    Broken,
    End,
    Evaluation,
    RankPart,
    Record,
    Resume,
    Retraction,
    Saved,
    Start,
    Step,
    StepDigests,
)
from andon_contracts.violation import Violation


@dataclass
class History:
    """The run so far, by its ledger, relative to the checkpoint from which it resumes.

    head: the digest of the ledger line that the checkpoint quotes; None if the ledger is shorter. steps: the last
    record of each step after the checkpoint, which will be repeated; without retracted steps and those of another
    machine or other versions, whose bits may differ. retraction: of a violation, if the process ended before writing
    it. violations: the number recorded. evaluated, ended: the final scores and the end, if the process was interrupted
    after writing them on this machine and versions. world, backend: of the last process. last: the last valid update.
    """

    head: str | None = None
    steps: dict[int, Step] = field(default_factory=dict)
    retraction: Retraction | None = None
    violations: int = 0
    evaluated: Evaluation | None = None
    ended: End | None = None
    world: int = 0
    backend: str = ""
    last: int = 0

    def forget_after(self, step: int) -> None:
        self.steps = {number: record for number, record in self.steps.items() if number <= step}


def retracted(violation: Broken, kept: int, last: int) -> Retraction | None:
    """The retraction of updates after `kept`, the last checkpoint's step, up to `last`; None without such updates.

    A clause that is checked only periodically (the frozen base, an audit, a checkpoint read back) may have been broken
    by any update since its last check. All such clauses are checked before a checkpoint, so the steps up to the
    checkpoint are valid and later steps cannot be trusted.
    """
    return Retraction(kept, last, violation.clause, violation.seen) if last > kept else None


def begin_anew(config: Path) -> str:
    """The command that starts the run of `config` from step 0 in another folder."""
    return command_line("andon", "train", config, "--run-dir", "ANOTHER_FOLDER")


def read_history(ledger: Path, fingerprint: Mapping[str, str], checkpoint: Checkpoint | None = None) -> History:
    """The history in `ledger` of a run that resumes from `checkpoint` (None: from step 0); empty without a ledger.

    fingerprint: of this machine and its versions. Only steps after the checkpoint are held in memory. Raises
    `InputError` that names the line of a damaged ledger.
    """
    step, count = (checkpoint.step, checkpoint.head[0]) if checkpoint is not None else (0, 0)
    history = History(head=GENESIS if count == 0 else None)
    if not ledger.exists():
        return history
    comparable, saved = False, 0  # saved: the step of the last checkpoint
    try:
        for number, (record, digest) in enumerate(digested_ledger(ledger), start=1):
            # After the last step's checkpoint come only the final scores (of it or of the best step) and the end.
            closing = checkpoint is not None and number > count and comparable
            if number == count:
                history.head = digest
            match record:
                case Start() | Resume():
                    comparable = dict(record.fingerprint) == dict(fingerprint)
                    history.world, history.backend = record.world, record.backend
                    saved = record.step if isinstance(record, Resume) else 0
                case Step():
                    history.evaluated = history.ended = None
                    history.last = max(history.last, record.step)
                    if record.step > step:
                        history.steps.pop(record.step, None)  # only the latest record of a step counts
                        if comparable:
                            history.steps[record.step] = record
                case Saved():
                    saved = record.step
                case Broken():
                    history.evaluated = history.ended = None
                    history.violations += 1
                    history.retraction = retracted(record, saved, history.last)
                    history.forget_after(saved)  # `last` changes with the retraction's own record
                case Retraction():
                    history.retraction, history.last = None, min(history.last, record.step)
                    history.forget_after(record.step)
                case Evaluation() if closing and record.step <= step == history.last:
                    history.evaluated = record
                case End() if closing and record.step == step and record.reason in ("finished", "early-stopping"):
                    history.ended = record
    except LedgerError as error:
        anew = f"put the file back as it was, or begin anew: {begin_anew(ledger.with_name('config.yaml'))}"
        raise InputError.at("", f"{error}; the run cannot be resumed: {anew}") from error
    if history.retraction is not None:  # the resume writes it first
        history.last = history.retraction.step
    return history


def violation_records(violation: Violation, step: int, weights: int, kept: int, last: int) -> Iterator[Record]:
    """The last records of a run: the violation, its retraction if any, and the end.

    step, weights: the last update and the digest of its weights. kept, last: as for `retracted`.
    """
    finding = violation.finding
    broken = Broken(
        clause=violation.clause or "unnamed",
        step=finding.step,
        ranks=finding.ranks,
        tensor=finding.tensor,
        seen=finding.seen,
        details=dict(finding.details),
        applied=0 < finding.step <= step or None,
    )
    yield broken
    taken_back = retracted(broken, kept, max(step, last))
    if taken_back is not None:
        yield taken_back
    yield End(step, "violation", {"weights": hex64(weights)}, violations=1)


def step_record(batch: GlobalBatch, result: StepResult, world_size: int, backend: str) -> Step:
    """The ledger's record of one update, equal on all ranks."""
    placeholders = dict.fromkeys(("content", "gradient", "weights", "optimizer"), UNKNOWN)
    rows = batch.micro_batches(len(result.leaves))
    parts = []
    for rank in range(world_size):
        leaves = tuple(leaf.index for leaf in result.leaves if leaf.rank == rank)
        digests = {name: hex64(value) for name, value in result.ranks[rank].items()} if result.ranks else {}
        ids = tuple(row for leaf in leaves for row in rows[leaf])
        parts.append(RankPart(rank=rank, leaves=leaves, ids=ids, **(digests or {"weights": UNKNOWN})))
    return Step(
        step=result.step,
        epoch=batch.epoch,
        position=batch.position,
        ids=batch.ids,
        count=result.rows,
        lr=Real.of(result.rate),
        loss=Real.of(result.loss),
        grad_norm=Real.of(result.grad_norm),
        correct=result.correct,
        terms=result.terms if result.terms != result.rows else None,
        world=world_size,
        backend=backend,
        digests=StepDigests(**placeholders | {name: hex64(value) for name, value in result.digests.items()}),
        ranks=tuple(parts),
    )


_SAVE_WAIT = 19
"""Rank 0 waits this many times the duration of the last checkpoint, so that timed saving takes at most 5 % of time."""
_WRITTEN, _REFUSED, _BROKEN = 0, 1, 2
"""Outcome of a checkpoint on the rank that writes it."""


@dataclass(frozen=True)
class Progress:
    """Position and best result of a run, saved in checkpoints together with the tensors.

    best_weights: the digest of the weights after `best_step`; 0 if contracts were off then. bad_evaluations: the number
    of later evaluations, all without a lower validation loss.
    """

    step: int = 0
    best_step: int = 0
    best_loss: float = math.inf
    best_weights: int = 0
    bad_evaluations: int = 0
    last_loss: float = math.nan


class Journal:
    """Base class that records nothing, for ranks other than 0. Rank 0 writes files (`journal.FolderJournal`)."""

    def step(self, batch: GlobalBatch, result: StepResult, record: Step) -> None:
        """Record an update; `record` is its line of the ledger."""

    def evaluated(self, step: int, epoch: int, scores: Scores, what: str) -> None:
        """Record scores after `step` updates."""

    def checkpoint(self, progress: Progress, *, best: bool) -> None:
        """Save the training state. best: it has the lowest validation loss so far."""

    def close(self) -> None:
        """Close files. Idempotent."""


@dataclass
class Trainer:
    """Trains `parts` from `progress`, the current state of its replicas, to the end of the plan.

    repeats: recorded steps that must be repeated exactly. evaluate: scores the validation rows; None without such rows.
    stop_asked: returns whether to stop at the next step boundary. clock: receives the current step and phase. progress,
    weights: the progress and the weights' digest after the last valid step.
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
    _save_deadline: float = field(default=math.inf, init=False)
    _under_way: list[tuple[GlobalBatch, Pending]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.weights = self.parts.primary.weights_digest()

    def run(self) -> str:
        """Train, and return why it ended: `finished`, `early-stopping` or `preempted`. Collective.

        Raises `Violation` on all ranks; `InputError` on a rank that cannot write (`RankFailed` on the others).
        """
        stop, reason = False, "finished"
        self._schedule_save(0.0)
        for step in range(self.progress.step + 1, self.parts.plan.total_steps + 1):
            if self._out_of_patience():
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
        """Do one update and the work due after it; returns whether a rank requests a stop.

        With late judgement, an update is launched before the previous one is settled. If evaluation, a checkpoint or
        the base digest is due after an update, it is settled before the next one is launched.
        """
        self.clock.at(batch.step, UPDATE)
        # Signals and clocks differ between ranks, so each rank sends its requests to all with the update.
        requests = {"stop": self.stop_asked(), "save": monotonic() >= self._save_deadline}
        rate, run_step = self.parts.schedule.rate(batch.step), self.parts.step
        if not run_step.late:
            result = run_step(batch, rate, batch.step, **requests)
            self._settle(batch, result, stopping=result.stop, saving=result.save)
            return result.stop
        self._under_way.append((batch, run_step.launch(batch, rate, batch.step, **requests)))
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
        """Set rank 0's deadline for the next timed checkpoint; `took`: seconds that the last one took."""
        minutes = self.parts.config.training.checkpoint_minutes
        if minutes is not None and self.parts.backend.ranks[0] == 0:
            self._save_deadline = monotonic() + max(60 * minutes, _SAVE_WAIT * took)

    def _out_of_patience(self) -> bool:
        patience = self.parts.config.training.early_stopping_patience
        return patience is not None and self.progress.bad_evaluations >= patience

    def _settle(self, batch: GlobalBatch, result: StepResult, *, stopping: bool, saving: bool) -> None:
        """Record a valid update, then evaluate, save and check the base if due. stopping, saving: ranks' requests."""
        step, backend, training = batch.step, self.parts.backend, self.parts.config.training
        record = step_record(batch, result, backend.world_size, backend.name)
        self.repeats.judge(record)  # before writing: the ledger must not get two results of a step
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
        saving = saving or stopping or best or self._out_of_patience() or self._is_due(step, training.checkpoint_every)
        # Frozen weights are too large to check after each update, but they are checked before each checkpoint.
        if saving or step % self.parts.config.contracts.base_every == 0:
            self.parts.step.attest_base(step, self.parts.base)
        if saving:
            self._save(best=best)
            self._saved_at = step
            self._schedule_save(monotonic() - began)

    def _save(self, *, best: bool) -> None:
        """Write a checkpoint and gather its outcome, so that all ranks continue or none does. Collective."""
        error: InputError | Violation | None = None
        self.clock.at(self.progress.step, "checkpoint")
        try:
            self.journal.checkpoint(self.progress, best=best)
        except (InputError, Violation) as refused:
            error = refused
        outcome = _WRITTEN if error is None else _BROKEN if isinstance(error, Violation) else _REFUSED
        # Gather even if this rank will raise, since the others wait here.
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
    """Scores rows. Caches the last and the best evaluation, so that repeating either needs no forward pass.

    The key is the number of updates, which is equal on all ranks. If it were the weights' digest, a rank with damaged
    weights would miss the cache and wait alone in a gather.
    """

    backend: Backend
    replicas: Sequence[Replica]
    batching: EvaluationBatching
    _cache: dict[tuple[int, int, tuple[int, ...]], Scores] = field(default_factory=dict)

    def __call__(self, task: ScoredTask, ids: Sequence[int], after: int | None = None) -> Scores:
        """Scores by `evaluate`. after: the number of updates of the loaded weights; None: the replicas' own count."""
        key = (self.replicas[0].updates if after is None else after, id(task), tuple(ids))
        if key not in self._cache:
            best = sorted(self._cache.items(), key=lambda entry: math.inf if entry[1].loss is None else entry[1].loss)
            models = [replica.model for replica in self.replicas]
            self._cache = dict(best[:1]) | {key: evaluate(self.backend, models, task, ids, self.batching)}
        return self._cache[key]


def evaluate(
    backend: Backend,
    models: Sequence[nn.Module],
    task: ScoredTask,
    ids: Sequence[int],
    batching: EvaluationBatching | None = None,
) -> Scores:
    """Scores of the rows `ids` by the replicas' `models`, with the same bits for any number of ranks. Collective.

    Each rank evaluates whole batches. The raw outputs are gathered, and every rank scores the same table. Raises
    `Violation` unless the table has each row once, in order, and all rows are scored (`evaluation-once`), and outputs
    are finite (`finite`).
    """
    batches = (batching or EvaluationBatching()).of(task.lengths[list(ids)].tolist())
    # Dealt round-robin, since batches are sorted by length.
    owned = [batches[rank :: backend.world_size] for rank in range(backend.world_size)]
    most = max(sum(map(len, each)) for each in owned)

    def outputs_of(index: int) -> torch.Tensor:
        device = backend.devices[index]
        # Filled with -1, since a gather needs equal shapes on all ranks. fp64 holds ids and fp32 outputs exactly.
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
    if len(table) == len(places):  # a table of another length is left for the contract to reject
        table = table[places.argsort()]
    row_ids, outputs = [int(value) for value in table[:, 0].tolist()], table[:, 1:]
    evaluation = Scored(0, (tuple(row_ids),), len(ids), {}, {}, planned=tuple(ids))
    enforce(Judgement(EVALUATED, evaluation))
    finite = outputs.isfinite().all(dim=1).tolist()
    not_finite = tuple(row for row, is_finite in zip(row_ids, finite, strict=True) if not is_finite)
    enforce(Judgement(OUTPUT, Output(task.output, len(row_ids), not_finite)))
    result = task.score(row_ids, outputs)
    counted = {"rows": float(len(ids))}
    enforce(Judgement(EVALUATED, replace(evaluation, reported={"rows": [float(result.rows)]}, counted=counted)))
    return result
