"""One case on one backend in this process: assemble, plant what is to be planted, train, and tell what was seen."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from andon.backend.base import Backend
from andon.run.checkpoint import newest_valid
from andon.run.folder import RunFolder
from andon.run.ledger import LedgerWriter, Repeats
from andon.step.replica import state_tensors
from andon.training.trainer import (
    FolderJournal,
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
from andon_contracts.record import End, Plan, Resume, Start
from andon_contracts.violation import Violation
from andon_falsify.subjects.assembly import Parts, describe, frozen_of, in_process, put_together
from andon_falsify.subjects.case import Case
from andon_falsify.subjects.meter import StorageMeter
from andon_falsify.subjects.placing import devices_of, place_of_bits
from andon_falsify.subjects.trace import CutOff, Sightings, digest
from andon_falsify.subjects.watching import WatchedJournal, WatchedStep, state_digests, watch_gradient

Plant = Callable[[Parts, ExitStack], None]
"""Changes the parts of a run, and has the stack undo what is not a part's own."""


def drive(case: Case, backend: Backend, plant: Plant | None = None, *, late: bool | None = None) -> Sightings:
    """Run `case` on `backend` (closed afterwards) and return what this process saw. late: see `TrainingStep`.

    plant: the fault that the case names, which a case alone does not hold.

    Bytes are counted where all ranks are on the CPU. A violation ends the run and is in what is returned; any other
    error is raised.
    """
    with ExitStack() as stack:
        stack.enter_context(_deterministic())
        stack.callback(backend.close)
        if not case.contracts:
            stack.enter_context(suspended())
        counting = case.memory and place_of_bits(devices_of(case.backend, case.world)) == "cpu"
        meters = {rank: StorageMeter() for rank in backend.ranks} if counting else {}
        parts = put_together(case, backend, meters, late=late)
        if plant is not None:
            plant(parts, stack)
        describe(parts)
        for rank, replica in parts.by_rank.items():
            watch_gradient(parts.seen, rank, replica, values=case.values)
        path = case.folder or stack.enter_context(tempfile.TemporaryDirectory(prefix="andon-falsify-"))
        folder = RunFolder(Path(path))
        folder.checkpoints.mkdir(exist_ok=True, parents=True)
        if meters:
            for rank, replica in parts.by_rank.items():
                model, flat = replica.model, replica.parameters
                meters[rank].adopt([*model.parameters(), *model.buffers(), flat.weights, flat.gradient])
            if not in_process(backend):
                stack.enter_context(meters[backend.ranks[0]])
        _train(parts, folder, meters)
        _finish(parts, folder, meters)
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


def _train(parts: Parts, folder: RunFolder, meters: dict[int, StorageMeter]) -> None:
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
    parts.step = step = WatchedStep(parts)  # type: ignore[assignment]
    inner = None
    if parts.writes:
        inner = _journal(parts, folder, progress)
    journal = WatchedJournal(parts, step, inner, meters)
    trainer = Trainer(parts, journal, progress, Repeats(history.steps))
    try:
        journal.append(_opening(parts, progress))
        step.attest_start({"progress": progress.step})
        trainer.run()
        journal.append(End(parts.plan.total_steps, "finished", {}))
    except Violation as violation:
        parts.seen.violation = (violation.clause or "unnamed", violation.finding.step, str(violation))
        saved_at = inner.saved_at if inner is not None else 0
        for record in violation_records(violation, trainer.progress.step, trainer.weights, saved_at, history.last):
            journal.append(record)
    except CutOff:
        pass
    finally:
        journal.close()


def _fingerprint(parts: Parts) -> dict[str, str]:
    """All runs of a suite are of one machine and one set of versions: bits are comparable where devices are alike."""
    return {"machine": "this one", "devices": parts.seen.place}


def _journal(parts: Parts, folder: RunFolder, progress: Progress) -> FolderJournal:
    """The trainer's own, which keeps all checkpoints and shows nothing."""
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


def _opening(parts: Parts, progress: Progress) -> Start | Resume:
    plan, replica = parts.plan, parts.replicas[0]
    digests = {"weights": hex64(replica.weights_digest()), "base": hex64(replica.base_digest())}
    world, name = parts.backend.world_size, parts.backend.name
    if progress.step:
        return Resume(progress.step, "case", _fingerprint(parts), digests, world, name)
    described = Plan(len(plan.ids), plan.batch_size, plan.micro_batches, plan.seed, plan.epochs, plan.total_steps)
    return Start("case", _fingerprint(parts), "case", described, digests, world, name)


def _finish(parts: Parts, folder: RunFolder, meters: dict[int, StorageMeter]) -> None:
    for rank, replica in parts.by_rank.items():
        parts.seen.final[rank] = state_digests(replica)
        parts.seen.frozen[rank] = (parts.seen.frozen[rank][0], digest(frozen_of(replica.model)))
        if rank in meters:
            parts.seen.peaks[rank] = meters[rank].peak
    if parts.writes:
        parts.seen.ledger = folder.ledger.read_bytes()
