"""One case on one backend in this process: build the trainer, plant a fault, train, and return what was seen."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import torch

from andon.backend.base import Backend, InlineBackend
from andon.run.checkpoint import newest_valid
from andon.run.folder import RunFolder
from andon.run.ledger import LedgerWriter, Repeats
from andon.step.plan import GlobalBatch
from andon.step.replica import state_tensors
from andon.step.step import StepResult
from andon.training.trainer import (
    FolderJournal,
    Journal,
    MetricsWriter,
    Progress,
    ProgressView,
    Trainer,
    progress_from,
    read_history,
    violation_records,
)
from andon_contracts.digest import hex64
from andon_contracts.policy import suspended
from andon_contracts.record import End, Plan, Resume, Start, Step
from andon_contracts.violation import Violation
from andon_falsify.subjects.assembly import TrainerUnderTest, put_together
from andon_falsify.subjects.case import Case
from andon_falsify.subjects.trace import CutOff, Observations, copied
from andon_falsify.subjects.watching import Proxy, note_end, note_result, note_start, watch_gradient, watched_step

Plant = Callable[[TrainerUnderTest, ExitStack], None]
"""Plants a fault in a run; the stack undoes what does not belong to the run alone."""


def drive(case: Case, backend: Backend, plant: Plant | None = None, *, late: bool | None = None) -> Observations:
    """Run `case` on `backend`, close it, and return what this process saw. late: see `TrainingStep`.

    A violation ends the run and is in the result; any other error is raised.
    """
    with ExitStack() as stack:
        stack.enter_context(_deterministic())
        stack.callback(backend.close)
        if not case.contracts:
            stack.enter_context(suspended())
        parts = put_together(case, backend, late=late)
        if plant is not None:
            plant(parts, stack)
        _describe(parts)
        path = case.folder or stack.enter_context(tempfile.TemporaryDirectory(prefix="andon-falsify-"))
        folder = RunFolder(Path(path))
        folder.checkpoints.mkdir(exist_ok=True, parents=True)
        for rank, meter in parts.meters.items():
            model, flat = parts.by_rank[rank].model, parts.by_rank[rank].parameters
            meter.adopt([*model.parameters(), *model.buffers(), flat.weights, flat.gradient])
            if not isinstance(backend, InlineBackend):
                stack.enter_context(meter)
        _train(parts, folder)
        note_end(parts.seen, parts.by_rank)
        parts.seen.peaks = {rank: meter.peak for rank, meter in parts.meters.items()}
        if parts.writes:
            parts.seen.ledger = folder.ledger.read_bytes()
    return parts.seen


@contextmanager
def _deterministic() -> Iterator[None]:
    before, threads = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    torch.use_deterministic_algorithms(mode=True)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.set_num_threads(threads)


def _describe(parts: TrainerUnderTest) -> None:
    """Note the state at the start, faults included, and watch the gradients from now on."""
    case, seen = parts.case, parts.seen
    for rank, replica in parts.by_rank.items():
        note_start(seen, rank, replica.model)
        watch_gradient(seen, rank, replica, values=case.values)
    if case.values and parts.writes:
        model: Any = parts.primary.model
        tied = dict(model.named_parameters(remove_duplicate=False)).keys() - dict(model.named_parameters()).keys()
        seen.state = copied({name: value for name, value in model.state_dict().items() if name not in tied})
        base = model.get_base_model() if case.rank else model
        seen.config = cast(dict[str, Any], base.config.to_dict())


def _train(parts: TrainerUnderTest, folder: RunFolder) -> None:
    checkpoint, rejected = newest_valid(folder.checkpoints)
    if rejected:
        raise RuntimeError("; ".join(rejected))
    progress = Progress()
    if checkpoint is not None:
        parts.restore(checkpoint)
        progress, parts.seen.resumed_from = progress_from(checkpoint), checkpoint.step
    history = read_history(folder.ledger, _fingerprint(parts), checkpoint)
    # All ranks have read the ledger before rank 0 goes on writing it.
    parts.backend.gather([torch.zeros(1, device=device) for device in parts.backend.devices])
    parts.step = watched_step(parts.seen, parts.step, parts.by_rank)
    files = _files(parts, folder, progress) if parts.writes else None
    journal = _watched_journal(parts, files)
    trainer = Trainer(parts, journal, progress, Repeats(history.steps))
    append = files.ledger.append if files is not None else lambda record: None
    try:
        append(_opening(parts, progress))
        parts.step.attest_start({"progress": progress.step})
        trainer.run()
        append(End(parts.plan.total_steps, "finished", {}))
    except Violation as violation:
        parts.seen.violation = (violation.clause or "unnamed", violation.finding.step, str(violation))
        saved_at = files.saved_at if files is not None else 0
        for record in violation_records(violation, trainer.progress.step, trainer.weights, saved_at, history.last):
            append(record)
    except CutOff:
        pass
    finally:
        journal.close()


def _watched_journal(parts: TrainerUnderTest, files: FolderJournal | None) -> Any:
    """The trainer's own journal. Notes every result, and cuts the run off after the update that the case names."""
    inner, case, seen = files or Journal(), parts.case, parts.seen

    def step(batch: GlobalBatch, result: StepResult, record: Step) -> None:
        inner.step(batch, result, record)
        note_result(seen, batch, result.rows, result.correct, result.rate, result.loss, result.grad_norm)
        for rank, meter in parts.meters.items():
            seen.resting.setdefault(rank, []).append(meter.live)
        if case.stop_after == batch.step:
            raise CutOff

    def checkpoint(progress: Progress, *, best: bool) -> None:
        if case.folder is not None:
            inner.checkpoint(progress, best=best)

    return Proxy(inner, step=step, checkpoint=checkpoint)


def _fingerprint(parts: TrainerUnderTest) -> dict[str, str]:
    """All runs of a suite are on one machine with one set of versions, so the bits depend on the devices alone."""
    return {"machine": "this one", "devices": parts.seen.place}


def _files(parts: TrainerUnderTest, folder: RunFolder, progress: Progress) -> FolderJournal:
    """The trainer's own journal, which keeps all checkpoints and shows nothing."""
    return FolderJournal(
        folder=folder,
        ledger=LedgerWriter(folder.ledger),
        metrics=MetricsWriter(folder.metrics, progress.step),
        view=ProgressView(0, sys.maxsize, "quiet"),
        tensors=lambda: state_tensors(parts.primary),
        fixed_state={},
        keep=sys.maxsize,
        saved_at=progress.step,
    )


def _opening(parts: TrainerUnderTest, progress: Progress) -> Start | Resume:
    plan, replica = parts.plan, parts.primary
    digests = {"weights": hex64(replica.weights_digest()), "base": hex64(replica.base_digest())}
    where = (_fingerprint(parts), digests, parts.backend.world_size, parts.backend.name)
    if progress.step:
        return Resume(progress.step, "case", *where)
    described = Plan(len(plan.ids), plan.batch_size, plan.micro_batches, plan.seed, plan.epochs, plan.total_steps)
    return Start("case", where[0], "case", described, *where[1:])
