"""Rank 0's writer of the run folder: ledger, metrics and checkpoints; and the progress display."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from andon.console.messages import BROKEN_STREAM, InputError, write
from andon.integrations.trackers import Tracker
from andon.metrics.scores import Scores, digest_of, write_confusion
from andon.run.atomic import storage, write_all, write_whole
from andon.run.checkpoint import MANIFEST, Checkpoint, prune, save_checkpoint
from andon.run.folder import RunFolder, metrics_lines
from andon.run.ledger import LedgerWriter
from andon.run.summary import HELD_OUT, LAST_VALIDATION, quoted
from andon.step.plan import GlobalBatch
from andon.step.step import StepResult
from andon.training.trainer import Journal, Progress
from andon_contracts.fields import Real
from andon_contracts.record import Evaluation, Saved, Step, outside_change

_SILENT_S = 12.0
"""Seconds after which an update prints a line in any case, so that slow updates do not look like a hung run."""


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
        is_final = values.get("what") in (HELD_OUT, LAST_VALIDATION)
        return line.endswith(b"\n") and int(values["step"]) <= done and not is_final
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return False


class ProgressView:
    """Shows metrics on standard error, as a rich progress bar or as lines for `grep`.

    mode: auto (a bar on a terminal, else lines), always (a bar), never (lines), quiet (nothing), json (only metrics, on
    standard output). done: steps already done.
    """

    def __init__(self, total_steps: int, log_every: int, mode: str = "auto", done: int = 0) -> None:
        self._mode, self._total, self._every, self._done_before = mode, total_steps, log_every, done
        self._started = self._last_line = time.perf_counter()
        self._bar: Any = None
        try:
            on_terminal = sys.stderr.isatty()
        except ValueError:  # standard error is closed
            on_terminal = False
        if mode == "always" or (mode == "auto" and on_terminal):
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Bar(*columns, console=Console(stderr=True))
            self._bar.start()
            self._bar.add_task("starting", total=total_steps, completed=done)

    def step(self, line: Mapping[str, Any]) -> None:
        """Show the metrics of an update."""
        step, epoch, loss, now = line["step"], line["epoch"], line["loss"], time.perf_counter()
        shown = step % self._every == 0 or step == self._total
        if self._mode == "json" and shown:
            write(f"{json.dumps(line)}\n", sys.stdout)
        elif self._bar is not None:
            with suppress(*BROKEN_STREAM):
                self._bar.update(self._bar.task_ids[0], completed=step, description=f"epoch {epoch} loss {loss:.4f}")
        elif shown or now - self._last_line > _SILENT_S:
            rate = (step - self._done_before) / (now - self._started)
            right = f"train_acc {line['accuracy']:.3f} " if "accuracy" in line else ""
            self._line(
                f"step {step}/{self._total} epoch {epoch} loss {loss:.4f} {right}"
                f"grad_norm {line['grad_norm']:.3f} lr {line['lr']:.2e} {rate:.3g} steps/s"
            )

    def evaluated(self, line: Mapping[str, Any]) -> None:
        """Show the metrics of an evaluation."""
        if self._mode == "json":
            write(f"{json.dumps(line)}\n", sys.stdout)
        loss = f" loss {line['loss']:.4f}" if "loss" in line else ""
        scores = " ".join(f"{word} {value:.4f}" for word, value in quoted(line).items())
        self._line(f"{line['what']} after step {line['step']}: {scores}{loss} ({line['rows']} rows)")

    def close(self) -> None:
        if self._bar is not None:
            with suppress(*BROKEN_STREAM):
                self._bar.stop()
            self._bar = None

    def _line(self, text: str) -> None:
        if self._mode in ("quiet", "json"):
            return
        self._last_line = time.perf_counter()
        if self._bar is not None:
            with suppress(*BROKEN_STREAM):
                self._bar.console.print(text)
        else:
            write(f"{text}\n")


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
    """The ledger record of scores after `step` updates."""
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
