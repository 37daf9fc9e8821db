"""What a run leaves in its folder while it trains: the ledger, metrics, checkpoints. Rank 0 alone writes."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from andon.console.problems import InputError, Problem
from andon.integrations.trackers import Tracker
from andon.metrics.confusion import digest_of, write_confusion
from andon.metrics.scores import Scores
from andon.run.atomic import storage, write_all, write_whole
from andon.run.checkpoint import MANIFEST, Checkpoint, prune, save_checkpoint
from andon.run.folder import RunFolder, metrics_lines
from andon.run.ledger import LedgerWriter
from andon.run.summary import HELD_OUT, LAST_VALIDATION
from andon.step.plan import GlobalBatch
from andon.step.step import StepResult
from andon.training.progress import ProgressView
from andon.training.trainer import Progress
from andon_contracts.fields import Real
from andon_contracts.record import Evaluation, Record, Saved, Step, outside_change


class SilentJournal:
    """The journal of every rank but 0."""

    def step(self, batch: GlobalBatch, result: StepResult, record: Step) -> None:
        """Nothing is written."""

    def evaluated(self, step: int, epoch: int, scores: Scores, what: str) -> None:
        """Nothing is written."""

    def checkpoint(self, progress: Progress, *, best: bool) -> None:
        """Nothing is written."""

    def close(self) -> None:
        """Nothing is held."""


class MetricsWriter:
    """Appends lines of JSON, each whole or not at all.

    A disk that refuses a line, and a file that another program truncated or replaced, is an `InputError`.
    Lines that an interrupted run has left and that will be written again are dropped first: those after `done` steps,
    and the scores of the rows never trained on. Every tracker is given every line too.
    """

    def __init__(self, path: Path, done: int, trackers: Iterable[Tracker] = ()) -> None:
        self._path = path
        self._trackers = tuple(trackers)
        if path.exists():
            with storage(path, "read"):
                kept = b"".join(line for line in metrics_lines(path) if _is_up_to(line, done))
            write_whole(path, kept)
        with storage(path):
            self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        self._size = os.fstat(self._handle).st_size

    def write(self, line: Mapping[str, Any]) -> None:
        """Append one line."""
        data = (json.dumps(line) + "\n").encode()
        what = outside_change(self._handle, self._path, self._size)
        if what:
            raise InputError([Problem(str(self._path), what)])
        with storage(self._path):
            try:
                write_all(self._handle, data)
            except BaseException:
                # A line is whole or not there, also where who catches this writes on.
                os.ftruncate(self._handle, self._size)
                raise
        self._size += len(data)
        for tracker in self._trackers:
            tracker.line(line)

    def close(self) -> None:
        """Close the file; more than once is harmless."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1
            for tracker in self._trackers:
                tracker.close()


def _is_up_to(line: bytes, done: int) -> bool:
    try:
        found = json.loads(line)
        return (
            line.endswith(b"\n") and int(found["step"]) <= done and found.get("what") not in (HELD_OUT, LAST_VALIDATION)
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return False


class FolderJournal:
    """Writes the run folder. Each line is written at its step; a full disk is an `InputError` at that step."""

    def __init__(
        self,
        folder: RunFolder,
        ledger: LedgerWriter,
        metrics: MetricsWriter,
        view: ProgressView,
        tensors: Callable[[], Mapping[str, torch.Tensor]],
        fixed_state: Mapping[str, Any],
        keep: int,
        saved_at: int,
        *,
        counts_right: bool = True,
    ) -> None:
        """tensors: the state to save. fixed_state: what every checkpoint says of the run. keep: checkpoints to keep.

        saved_at: the step of the checkpoint that the run goes on from, or 0. counts_right: as a `ScoredTask` says it.
        """
        self._counts_right = counts_right
        self._folder = folder
        self._ledger = ledger
        self._metrics = metrics
        self._view = view
        self._tensors = tensors
        self._fixed_state = dict(fixed_state)
        self._keep = keep
        self.saved_at = saved_at
        """The step of the checkpoint that was saved, or loaded, last; 0 without one."""
        self._since = time.perf_counter()
        self._norms: Counter[bool] = Counter()

    def step(self, batch: GlobalBatch, result: StepResult, record: Step) -> None:
        """The ledger line, the metrics line, the progress."""
        self._ledger.append(record if self._counts_right else replace(record, correct=None))
        now = time.perf_counter()
        line = {
            "step": result.step,
            "epoch": batch.epoch,
            "loss": result.loss,
            **({"accuracy": result.correct / max(result.terms, 1)} if self._counts_right else {}),
            "grad_norm": result.grad_norm,
            "lr": result.rate,
            "rows": result.rows,
            "seconds": round(now - self._since, 6),
        }
        self._since = now
        self._norms[result.grad_norm != 0] += 1
        self._metrics.write(line)
        self._view.step(batch, result)
        self._view.measured(line)

    def evaluated(self, step: int, epoch: int, scores: Scores, what: str, *, recorded: bool = False) -> None:
        """The scores, in the ledger, unless they are `recorded` there already, and among the metrics.

        The confusion matrix is on the disk before the ledger's line that quotes it.
        """
        if scores.confusion is not None:
            write_confusion(self._folder.confusion, scores.confusion)
        if not recorded:
            self._ledger.append(evaluation_of(step, epoch, scores))
        line = {"step": step, "epoch": epoch, "what": what, "rows": scores.rows, **_reals(scores)}
        self._metrics.write(line)
        self._view.evaluated(step, scores, what)
        self._view.measured(line)

    def checkpoint(self, progress: Progress, *, best: bool) -> None:
        """The whole state, written whole or not at all; then old ones are pruned, the best is always kept.

        Raises `InputError` if the disk refuses, and `Violation` if it reads back other bytes.
        """
        self._ledger.sync()
        # Reals as hex, so that a checkpoint's state is strict JSON and exact.
        exact = {name: value.hex() if isinstance(value, float) else value for name, value in asdict(progress).items()}
        state = {**self._fixed_state, "progress": exact}
        path = save_checkpoint(self._folder.checkpoints, progress.step, self._tensors(), state, self._ledger.head)
        digest = json.loads((path / MANIFEST).read_bytes())["digest"]
        self._ledger.append(Saved(step=progress.step, name=path.name, digest=digest, best=best))
        self.saved_at = progress.step
        prune(self._folder.checkpoints, self._keep, best=progress.best_step, newest=progress.step)

    @property
    def all_zero(self) -> int:
        """The number of updates of this process if the gradient of every one of them was exactly zero, else 0."""
        return 0 if self._norms[True] else self._norms[False]

    def append(self, record: Record) -> None:
        """Any other record: start, resume, violation, retraction, end."""
        self._ledger.append(record)

    @property
    def head(self) -> tuple[int, str]:
        """Lines of the ledger and the digest of the last, after all of them are on the disk."""
        self._ledger.sync()
        return self._ledger.head

    def close(self) -> None:
        """Close everything; more than once is harmless."""
        self._view.close()
        self._metrics.close()
        self._ledger.close()


def evaluation_of(step: int, epoch: int, scores: Scores) -> Evaluation:
    """What the ledger says of scores after `step` updates."""
    reals = {name: Real.of(value) for name, value in _reals(scores).items()}
    confusion = digest_of(scores.confusion) if scores.confusion is not None else None
    return Evaluation(step=step, epoch=epoch, rows=scores.rows, scores=reals, confusion=confusion)


def _reals(scores: Scores) -> dict[str, float]:
    return {name: value for name, value in scores.as_dict().items() if isinstance(value, float)}


def progress_from(checkpoint: Checkpoint) -> Progress:
    """The progress that the checkpoint's state holds. Raises `InputError` for one of another form or step."""
    try:
        found = checkpoint.state["progress"]
        values: dict[str, Any] = {
            name: float.fromhex(value) if isinstance(value, str) else int(value) for name, value in found.items()
        }
        progress = Progress(**values)
        if progress.step != checkpoint.step or not 0 <= progress.best_step <= progress.step:
            raise ValueError(f"it is of step {progress.step}, its best of step {progress.best_step}")
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        what = f"its state has no usable progress: {error}"
        raise InputError([Problem(str(checkpoint.path), what)]) from error
    return progress
