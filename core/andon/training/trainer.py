"""The training loop: epochs, evaluation, checkpoints and early stopping. All ranks make the same decisions.

Decisions depend on bits that are equal on all ranks: results of a step, scores of a gathered table. Ranks exchange only
what a single rank knows: a request to stop, a checkpoint that is due by rank 0's clock, a failure to write one.

Every rank reads the same ledger and compares repeated steps with it, so if a step does not repeat exactly, all ranks
end with the same error. Rank 0's journal writes the ledger, metrics and checkpoints, and shows the progress.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from statistics import fmean
from time import monotonic
from typing import Any

import torch
from torch import nn

from andon.backend.base import Backend
from andon.console.messages import BROKEN_STREAM, InputError, command_line, moves_cursor, write
from andon.integrations.trackers import Tracker
from andon.metrics.scores import Scores, digest_of, write_confusion
from andon.model.masks import EvaluationBatching
from andon.run.atomic import storage, write_all, write_whole
from andon.run.checkpoint import MANIFEST, Checkpoint, prune, save_checkpoint
from andon.run.folder import RunFolder, metrics_lines
from andon.run.ledger import UNKNOWN, LedgerError, LedgerWriter, Repeats, digested_ledger
from andon.run.summary import EVALUATION, LAST_VALIDATION, quoted
from andon.step.micro_batch import Batch
from andon.step.plan import GlobalBatch
from andon.step.replica import Replica
from andon.step.step import Pending, RankFailed, StepResult
from andon.tasks.text import ScoredTask
from andon.training.build import Run
from andon_contracts.digest import hex64
from andon_contracts.fields import Real
from andon_contracts.laws.law import Judgement, enforce
from andon_contracts.laws.update import EVALUATED, OUTPUT, RESTORED, Output
from andon_contracts.laws.update import Evaluation as Scored
from andon_contracts.legible import counted
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
    outside_change,
)
from andon_contracts.violation import Finding, Violation


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
            self.parts.step.attest_base(self.progress.step, self.parts.frozen)
        return reason

    def _advance(self, batch: GlobalBatch) -> bool:
        """Do one update and the work due after it; returns whether a rank requests a stop. With late judgement, an
        update is settled after the next one is launched, unless evaluation, a checkpoint or the base digest is due."""
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
        minutes = self.parts.config.training.checkpoint_minutes
        if minutes is not None and self.parts.backend.ranks[0] == 0:
            self._save_deadline = monotonic() + max(60 * minutes, _SAVE_WAIT * took)

    def _out_of_patience(self) -> bool:
        patience = self.parts.config.training.early_stopping_patience
        return patience is not None and self.progress.bad_evaluations >= patience

    def _settle(self, batch: GlobalBatch, result: StepResult, *, stopping: bool, saving: bool) -> None:
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
            self.parts.step.attest_base(step, self.parts.frozen)
        if saving:
            self._save(best=best)
            self._saved_at = step
            self._schedule_save(monotonic() - began)

    def _save(self, *, best: bool) -> None:
        error: InputError | Violation | None = None
        self.clock.at(self.progress.step, "checkpoint")
        self.parts.step.gather_state(self.progress.step)
        try:
            self.journal.checkpoint(self.progress, best=best)
        except (InputError, Violation) as refused:
            error = refused
        self.parts.primary.whole.clear()
        outcome = _WRITTEN if error is None else _BROKEN if isinstance(error, Violation) else _REFUSED
        # Gather even if this rank will raise, since the others wait here.
        backend = self.parts.backend
        outcomes = backend.gather([torch.tensor([outcome], device=device) for device in backend.devices])
        if error is not None:
            raise error
        for rank, what in enumerate(map(int, outcomes)):
            if what == _BROKEN:
                seen = f"rank {rank} did not read back what it wrote"
                enforce(Judgement(RESTORED, Finding(seen, self.progress.step, (rank,))))
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

    Every rank scores the same table of outputs. Raises `Violation` as `gathered_outputs` does, and unless all rows are
    scored (`evaluation-once`).
    """
    batches = (batching or EvaluationBatching()).of(task.lengths[list(ids)].tolist())
    rows, outputs = gathered_outputs(backend, models, task, ids, batches, task.outputs, task.width)
    result = task.score(rows, outputs)
    reported, counted = {"rows": [float(result.rows)]}, {"rows": float(len(ids))}
    enforce(Judgement(EVALUATED, Scored(0, (tuple(rows),), len(ids), reported, counted, planned=tuple(ids))))
    return result


def gathered_outputs(
    backend: Backend,
    models: Sequence[nn.Module],
    task: ScoredTask,
    ids: Sequence[int],
    batches: Sequence[Sequence[int]],
    outputs: Callable[[nn.Module, Batch], torch.Tensor],
    width: int,
) -> tuple[list[int], torch.Tensor]:
    """`ids`, and fp64 [ids, width] on the CPU: `outputs` of these rows. Collective; every rank gets all of them.

    batches: indices of `ids`; a rank computes whole ones. Raises `Violation` unless each row is there once, in order
    (`evaluation-once`), and outputs are finite (`finite`).
    """
    # Dealt round-robin, since batches are sorted by length.
    owned = [batches[rank :: backend.world_size] for rank in range(backend.world_size)]
    most = max(sum(map(len, each)) for each in owned)

    def outputs_of(index: int) -> torch.Tensor:
        device = backend.devices[index]
        # Filled with -1, since a gather needs equal shapes on all ranks. fp64 holds ids and fp32 outputs exactly.
        table = torch.full((most, 1 + width), -1.0, dtype=torch.float64, device=device)
        row = 0
        for batch in owned[backend.ranks[index]]:
            rows = [ids[place] for place in batch]
            table[row : row + len(rows), 0] = torch.tensor(rows, dtype=torch.float64, device=device)
            table[row : row + len(rows), 1:] = outputs(models[index], task.load(rows, device)).double()
            row += len(rows)
        return table

    table = torch.cat([part.cpu() for part in backend.gather(backend.map(outputs_of))])
    table = table[table[:, 0] >= 0]
    places = torch.tensor([place for each in owned for batch in each for place in batch], dtype=torch.int64)
    if len(table) == len(places):  # a table of another length is left for the contract to reject
        table = table[places.argsort()]
    row_ids, values = [int(value) for value in table[:, 0].tolist()], table[:, 1:]
    evaluation = Scored(0, (tuple(row_ids),), len(ids), {}, {}, planned=tuple(ids))
    enforce(Judgement(EVALUATED, evaluation))
    finite = values.isfinite().all(dim=1).tolist()
    not_finite = tuple(row for row, is_finite in zip(row_ids, finite, strict=True) if not is_finite)
    enforce(Judgement(OUTPUT, Output(task.output, len(row_ids), not_finite)))
    return row_ids, values


_SILENT_S = 12.0
"""Seconds after which an update prints a line in any case, so that slow updates do not look like a hung run."""
_REDRAW_S, _RECENT, _WIDE = 0.1, 100, 72
"""Seconds between two drawings of the bar; updates that the rate is computed of; columns for all parts of the bar."""


class MetricsWriter:
    """Appends JSON lines atomically to the metrics file, and passes each to every tracker.

    Raises `InputError` if a line cannot be written, or if another program truncated or replaced the file. First removes
    lines of an interrupted run that will be written again: those after step `done`, and the final scores.
    """

    def __init__(self, path: Path, done: int, trackers: Iterable[Tracker] = ()) -> None:
        self._path = path
        self._trackers = tuple(trackers)
        if path.exists():
            with storage(path, "read"):
                remaining = b"".join(line for line in metrics_lines(path) if _is_up_to(line, done))
            write_whole(path, remaining)
        with storage(path):
            self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        self._size = os.fstat(self._handle).st_size

    def write(self, line: Mapping[str, Any]) -> None:
        data = (json.dumps(line) + "\n").encode()
        what = outside_change(self._handle, self._path, self._size)
        if what:
            raise InputError.at(self._path, what)
        with storage(self._path):
            try:
                write_all(self._handle, data)
            except BaseException:
                # Remove a partial line, in case the caller catches the error and writes again.
                os.ftruncate(self._handle, self._size)
                raise
        self._size += len(data)
        for tracker in self._trackers:
            tracker.line(line)

    def close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1
            for tracker in self._trackers:
                tracker.close()


def _is_up_to(line: bytes, done: int) -> bool:
    try:
        values = json.loads(line)
        is_final = values.get("what") in (EVALUATION, LAST_VALIDATION)
        return line.endswith(b"\n") and int(values["step"]) <= done and not is_final
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return False


class ProgressView:
    """Shows metrics on standard error: a bar of one line on a terminal, else lines for `grep`.

    mode: auto (a bar on a terminal, else lines), never (lines), verbose (lines with every value), quiet (nothing), json
    (only metrics, on standard output). Loss and accuracy are means of the last `log_every` steps; epochs count from 1.
    """

    def __init__(self, total_steps: int, log_every: int, mode: str = "auto", done: int = 0, epochs: int = 1) -> None:
        self._mode, self._total, self._epochs, self._every = mode, total_steps, epochs, log_every
        self._last_line = time.perf_counter()
        self._recent = deque[Mapping[str, Any]](maxlen=log_every)
        self._times = deque([self._last_line], maxlen=_RECENT + 1)
        self._bar: Any = None
        if mode == "auto" and moves_cursor(sys.stderr):
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn
            from rich.table import Column

            console = Console(stderr=True, force_jupyter=False)
            text = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True))
            self._bar = Progress(BarColumn(None), text, console=console, auto_refresh=False, expand=True)
            with suppress(*BROKEN_STREAM):
                self._bar.start()
                console.show_cursor(True)  # a killed process could not show it again
                self._bar.add_task(f"{done}/{total_steps} starting", total=total_steps, completed=done)

    def step(self, line: Mapping[str, Any]) -> None:
        step, now = line["step"], time.perf_counter()
        self._recent.append(line)
        self._times.append(now)
        shown, since = step % self._every == 0 or step == self._total, now - self._last_line
        if self._mode == "json" and shown:
            write(f"{json.dumps(line)}\n", sys.stdout)
        rate = (len(self._times) - 1) / max(now - self._times[0], 1e-9)
        left = f"{timedelta(seconds=round((self._total - step) / rate))} left" if step < self._total else "done"
        loss = fmean(each["loss"] for each in self._recent)
        parts = [f"epoch {line['epoch'] + 1}/{self._epochs}", f"loss {loss:.4f}"]
        parts += [f"{rate:.3g} steps/s", left]
        if self._bar is not None and (since > _REDRAW_S or step == self._total):
            self._last_line = now
            text = "  ".join((f"{step}/{self._total}", *(parts if self._bar.console.width >= _WIDE else parts[1::2])))
            with suppress(*BROKEN_STREAM):
                self._bar.update(self._bar.task_ids[0], completed=step, description=text, refresh=True)
        elif self._bar is None and (shown or since > _SILENT_S):
            if self._mode == "verbose":
                right = [each["accuracy"] for each in self._recent if "accuracy" in each]
                parts += [f"training accuracy {fmean(right):.3f}"] if right else []
                parts += [f"grad_norm {line['grad_norm']:.3f}", f"lr {line['lr']:.2e}"]
            self._line(", ".join((f"step {step}/{self._total}", *parts)))

    def evaluated(self, line: Mapping[str, Any]) -> None:
        if self._mode == "json":
            write(f"{json.dumps(line)}\n", sys.stdout)
        loss = f" loss {line['loss']:.4f}" if "loss" in line else ""
        shown = {word: value for word, value in quoted(line).items() if word != "MCC" or self._mode == "verbose"}
        scores = " ".join(f"{word} {value:.4f}" for word, value in shown.items())
        if line["what"] != LAST_VALIDATION:  # those have been shown
            self._line(f"{line['what']} after step {line['step']}: {scores}{loss} ({counted(line['rows'], 'row')})")

    def close(self) -> None:
        if self._bar is not None:
            with suppress(*BROKEN_STREAM):
                self._bar.stop()
            self._bar = None

    def _line(self, text: str) -> None:
        if self._mode not in ("quiet", "json"):
            self._last_line = time.perf_counter()
            write(f"{text}\n")  # with a bar, rich prints it above


@dataclass
class FolderJournal(Journal):
    """Writes the run folder. Lines are written at their step; a full disk raises `InputError` at that step.

    tensors: returns the tensors to save. fixed_state: entries in every checkpoint's state. keep: number of checkpoints
    to keep. saved_at: step of the last checkpoint saved or loaded; 0 without one. counts_right: see `ScoredTask`.
    """

    folder: RunFolder
    ledger: LedgerWriter
    metrics: MetricsWriter
    view: ProgressView
    tensors: Callable[[], Mapping[str, torch.Tensor]]
    fixed_state: Mapping[str, Any]
    keep: int
    saved_at: int
    counts_right: bool = True
    zero_updates: int = field(default=0, init=False)
    """Updates of this process whose gradient was exactly zero."""
    updates: int = field(default=0, init=False)
    _since: float = field(default_factory=time.perf_counter, init=False)

    def step(self, batch: GlobalBatch, result: StepResult, record: Step) -> None:
        self.ledger.append(record if self.counts_right else replace(record, correct=None))
        now = time.perf_counter()
        line = {
            "step": result.step,
            "epoch": batch.epoch,
            "loss": result.loss,
            **({"accuracy": result.correct / max(result.terms, 1)} if self.counts_right else {}),
            "grad_norm": result.grad_norm,
            "lr": result.rate,
            "rows": result.rows,
            "seconds": round(now - self._since, 6),
        }
        self._since = now
        self.updates += 1
        self.zero_updates += result.grad_norm == 0
        self.metrics.write(line)
        self.view.step(line)

    def evaluated(self, step: int, epoch: int, scores: Scores, what: str, *, recorded: bool = False) -> None:
        """Write scores to the metrics and, unless already `recorded`, to the ledger.

        The confusion matrix is written before the ledger's line, which quotes its digest.
        """
        if scores.confusion is not None:
            write_confusion(self.folder.confusion, scores.confusion)
        if not recorded:
            self.ledger.append(evaluation_of(step, epoch, scores))
        line = {"step": step, "epoch": epoch, "what": what, "rows": scores.rows, **_reals(scores)}
        self.metrics.write(line)
        self.view.evaluated(line)

    def checkpoint(self, progress: Progress, *, best: bool) -> None:
        """Write a checkpoint atomically, then remove old checkpoints except the best.

        Raises `InputError` if it cannot be written, and `Violation` if reading it back gives other bytes.
        """
        self.ledger.sync()
        # Reals as hex strings: exact, and strict JSON even for infinities.
        exact = {name: value.hex() if isinstance(value, float) else value for name, value in asdict(progress).items()}
        state = {**self.fixed_state, "progress": exact}
        path = save_checkpoint(self.folder.checkpoints, progress.step, self.tensors(), state, self.ledger.head)
        digest = json.loads((path / MANIFEST).read_bytes())["digest"]
        self.ledger.append(Saved(step=progress.step, name=path.name, digest=digest, best=best))
        self.saved_at = progress.step
        prune(self.folder.checkpoints, self.keep, best=progress.best_step, newest=progress.step)

    def close(self) -> None:
        self.view.close()
        self.metrics.close()
        self.ledger.close()


def evaluation_of(step: int, epoch: int, scores: Scores) -> Evaluation:
    reals = {name: Real.of(value) for name, value in _reals(scores).items()}
    confusion = digest_of(scores.confusion) if scores.confusion is not None else None
    return Evaluation(step=step, epoch=epoch, rows=scores.rows, scores=reals, confusion=confusion)


def _reals(scores: Scores) -> dict[str, float]:
    return {name: value for name, value in scores.as_dict().items() if isinstance(value, float)}


def progress_from(checkpoint: Checkpoint) -> Progress:
    """The progress in the checkpoint's state. Raises `InputError` if it is malformed or of another step."""
    try:
        saved = checkpoint.state["progress"]
        values: dict[str, Any] = {
            name: float.fromhex(value) if isinstance(value, str) else int(value) for name, value in saved.items()
        }
        progress = Progress(**values)
        if progress.step != checkpoint.step or not 0 <= progress.best_step <= progress.step:
            raise ValueError(f"it is of step {progress.step}, its best of step {progress.best_step}")
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise InputError.at(checkpoint.path, f"its state has no usable progress: {error}") from error
    return progress
