"""What a run leaves in its folder while it trains: the ledger, metrics, checkpoints. Rank 0 writes, the others do not."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, TextIO

import torch

from andon.metrics.scores import Scores
from andon.run.checkpoint import prune, save_checkpoint
from andon.run.folder import RunFolder
from andon.run.ledger import LedgerWriter, same_again
from andon.step.plan import GlobalBatch, flatten
from andon.step.step import StepResult
from andon.training.progress import ProgressView
from andon.training.trainer import Progress
from andon_contracts.digest import hex64
from andon_contracts.fields import Real
from andon_contracts.policy import clause, require
from andon_contracts.record import Evaluation, RankPart, Record, Saved, Step, StepDigests
from andon_contracts.violation import Finding


class SilentJournal:
    """The journal of every rank but 0."""

    def step(self, batch: GlobalBatch, result: StepResult) -> None:
        """Nothing is written."""

    def evaluated(self, step: int, epoch: int, scores: Scores, what: str) -> None:
        """Nothing is written."""

    def checkpoint(self, progress: Progress, *, best: bool) -> None:
        """Nothing is written."""

    def close(self) -> None:
        """Nothing is held."""


def _explain_again(step: int, differences: tuple[str, ...]) -> Finding:
    return Finding(seen=f"the step was done before with other results: {'; '.join(differences)}", step=step)


@clause("resume-exact", _explain_again)
def _repeated_exactly(step: int, differences: tuple[str, ...]) -> bool:
    """A step that is done again gives what it gave."""
    return not differences


@require(_repeated_exactly)
def judge_repeat(step: int, differences: tuple[str, ...]) -> None:
    """After a resume: nothing differs between both records of `step`. Raises `Violation`."""


class FolderJournal:
    """Writes the run folder. Each line is flushed at its step; a full disk is an `InputError` at that step."""

    def __init__(
        self,
        folder: RunFolder,
        ledger: LedgerWriter,
        tensors: Callable[[], Mapping[str, torch.Tensor]],
        fixed_state: Mapping[str, Any],
        view: ProgressView,
        backend: str,
        world_size: int,
        earlier: Mapping[int, Step],
        keep: int,
    ) -> None:
        """tensors: the state to save. fixed_state: what every checkpoint says of the run. earlier: steps that an
        interrupted run has already recorded after the checkpoint it resumes from. keep: checkpoints to keep."""
        self._folder = folder
        self._ledger = ledger
        self._tensors = tensors
        self._fixed_state = dict(fixed_state)
        self._view = view
        self._backend = backend
        self._world_size = world_size
        self._earlier = dict(earlier)
        self._keep = keep
        self._metrics: TextIO = folder.metrics.open("a", encoding="utf-8")
        self._since = time.perf_counter()

    def step(self, batch: GlobalBatch, result: StepResult) -> None:
        """The ledger line, the metrics line, the progress."""
        record = self._record(batch, result)
        earlier = self._earlier.pop(batch.step, None)
        if earlier is not None and result.digests:
            judge_repeat(batch.step, same_again(earlier, record))
        self._ledger.append(record)
        now = time.perf_counter()
        line = {
            "step": result.step,
            "epoch": batch.epoch,
            "loss": result.loss,
            "accuracy": result.correct / max(result.rows, 1),
            "grad_norm": result.grad_norm,
            "lr": result.rate,
            "rows": result.rows,
            "seconds": round(now - self._since, 6),
        }
        self._since = now
        self._write_metrics(line)
        self._view.step(batch, result)

    def evaluated(self, step: int, epoch: int, scores: Scores, what: str) -> None:
        """The scores, in the ledger and among the metrics."""
        values = {
            name: Real.of(value)
            for name, value in scores.as_dict().items()
            if isinstance(value, float) and not isinstance(value, bool)
        }
        self._ledger.append(
            Evaluation(step=step, epoch=epoch, rows=scores.rows, scores=values, confusion=scores.confusion)
        )
        plain = {name: real.value for name, real in values.items()}
        self._write_metrics({"step": step, "epoch": epoch, "what": what, "rows": scores.rows, **plain})
        self._view.evaluated(step, scores, what)

    def checkpoint(self, progress: Progress, *, best: bool) -> None:
        """The whole state, written whole or not at all; then old ones are pruned, the best is always kept."""
        self._ledger.sync()
        count, head = self._ledger.head
        state = {**self._fixed_state, "progress": _finite(asdict(progress)), "ledger": {"lines": count, "digest": head}}
        tensors = self._tensors()
        path = save_checkpoint(self._folder.checkpoints, progress.step, tensors, state)
        digest = json.loads((path / "manifest.json").read_text())["digest"]
        self._ledger.append(Saved(step=progress.step, name=path.name, digest=digest, best=best))
        prune(self._folder.checkpoints, self._keep, best=progress.best_step or None)

    def append(self, record: Record) -> None:
        """Any other record: start, resume, violation, end."""
        self._ledger.append(record)

    @property
    def head(self) -> tuple[int, str]:
        """Lines of the ledger and the digest of the last."""
        return self._ledger.head

    def close(self) -> None:
        """Flush and close everything; more than once is harmless."""
        self._view.close()
        self._metrics.close()
        self._ledger.close()

    def _write_metrics(self, line: Mapping[str, Any]) -> None:
        self._metrics.write(json.dumps(line) + "\n")
        self._metrics.flush()

    def _record(self, batch: GlobalBatch, result: StepResult) -> Step:
        parts = batch.micro_batches(len(result.leaves))
        owned: dict[int, list[int]] = {rank: [] for rank in range(self._world_size)}
        for leaf in result.leaves:
            owned[leaf.rank].append(leaf.index)
        digests = {name: hex64(value) for name, value in result.digests.items()}
        none = dict.fromkeys(("content", "gradient", "weights", "optimizer"), "0" * 16)
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
            world=self._world_size,
            backend=self._backend,
            digests=StepDigests(**{**none, **digests}),
            ranks=tuple(
                RankPart(
                    rank=rank,
                    leaves=tuple(leaves),
                    ids=flatten([parts[index] for index in leaves]),
                    **{name: hex64(value) for name, value in (result.ranks[rank] if result.ranks else {}).items()}
                    or {"weights": "0" * 16},
                )
                for rank, leaves in owned.items()
            ),
        )


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """Reals as hex, so that a checkpoint's state is strict JSON and exact."""
    return {name: value.hex() if isinstance(value, float) else value for name, value in values.items()}


def progress_from(state: Mapping[str, Any]) -> Progress:
    """The progress that a checkpoint's state holds. Raises `ValueError` for one of another form."""
    try:
        found = state["progress"]
        values = {name: float.fromhex(value) if isinstance(value, str) else int(value) for name, value in found.items()}
        return Progress(**values)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        msg = f"the checkpoint's state has no usable progress: {error}"
        raise ValueError(msg) from error


def say(text: str) -> None:
    """One plain line for whoever watches the run."""
    print(text, file=sys.stderr, flush=True)
