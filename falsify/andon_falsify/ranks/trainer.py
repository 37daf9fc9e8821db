"""Our own trainer as a subject, on each of its backends: build it for a case, plant a fault, train, and observe it."""

from __future__ import annotations

import sys
import tempfile
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from andon.backend.base import Backend, GroupBackend, InlineBackend
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
from andon_falsify.ranks.pool import RankPools
from andon_falsify.subjects.assembly import TrainerUnderTest, put_together
from andon_falsify.subjects.case import Case
from andon_falsify.subjects.placing import IN_A_GROUP, devices_of
from andon_falsify.subjects.trace import CutOff, Observations, Trace, assemble_trace, copied
from andon_falsify.subjects.watching import Proxy, note_end, note_result, note_start, watch_gradient, watched_step


class AndonTrainer:
    """Runs every case on the backend that it names; process groups on the ranks of `pools`.

    late: whether the ranks of `inline` judge an update one step later, as GPUs do. None: as their devices do.
    """

    name = "andon"

    def __init__(self, pools: RankPools, *, late: bool | None = None) -> None:
        self._pools = pools
        self._late = late

    def run(self, case: Case) -> Trace:
        errors: dict[int, str] = {}
        try:
            if case.backend in IN_A_GROUP:
                answers = self._pools.of(case.world, case.backend).run("andon_falsify.ranks.trainer:train", case)
                parts = [answer.value for answer in answers if isinstance(answer.value, Observations)]
                errors = {rank: answer.error for rank, answer in enumerate(answers) if answer.error}
            else:
                parts = [_observe(case, InlineBackend(devices_of(case.backend, case.world)), late=self._late)]
        except Exception as error:  # noqa: BLE001 -- an error of the subject is part of what is judged
            parts, errors = [], {0: f"{type(error).__name__}: {error}"}
        return assemble_trace(case, parts, errors, f"{self.name} {case.backend}")


def train(case: Case) -> Observations:
    """Run `case` as one rank of this process's group."""
    return _observe(case, GroupBackend(case.backend, devices_of(case.backend, case.world)[dist.get_rank()]))


def _observe(case: Case, backend: Backend, *, late: bool | None = None) -> Observations:
    """Run `case` on `backend`, close it, and return what this process saw.

    A violation ends the run and is in the result; any other error is raised.
    """
    module, _, fault = (case.fault or "").partition(":")
    if case.fault is not None and not fault:
        raise ValueError(f"the fault {case.fault!r} must be package.module:name")
    plant = import_module(module).named(fault).plant if fault else None
    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        stack.callback(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled())
        torch.use_deterministic_algorithms(mode=True)
        torch.set_num_threads(1)
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


def _describe(parts: TrainerUnderTest) -> None:
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
    # All runs of a suite are on one machine with one set of versions, so the bits depend on the devices alone.
    fingerprint = {"machine": "this one", "devices": parts.seen.place}
    history = read_history(folder.ledger, fingerprint, checkpoint)
    # All ranks have read the ledger before rank 0 goes on writing it.
    parts.backend.gather([torch.zeros(1, device=device) for device in parts.backend.devices])
    parts.step = watched_step(parts.seen, parts.step, parts.by_rank)
    files = None
    if parts.writes:  # it keeps all checkpoints and shows nothing
        files = FolderJournal(
            folder=folder,
            ledger=LedgerWriter(folder.ledger),
            metrics=MetricsWriter(folder.metrics, progress.step),
            view=ProgressView(0, sys.maxsize, "quiet"),
            tensors=lambda: state_tensors(parts.primary),
            fixed_state={},
            keep=sys.maxsize,
            saved_at=progress.step,
        )
    journal = _watched_journal(parts, files)
    trainer = Trainer(parts, journal, progress, Repeats(history.steps))
    append = files.ledger.append if files is not None else lambda record: None
    plan, replica = parts.plan, parts.primary
    described = Plan(len(plan.ids), plan.batch_size, plan.micro_batches, plan.seed, plan.epochs, plan.total_steps)
    try:
        digests = {"weights": hex64(replica.weights_digest()), "base": hex64(replica.base_digest())}
        where = (digests, parts.backend.world_size, parts.backend.name)
        if progress.step:
            append(Resume(progress.step, "case", fingerprint, *where))
        else:
            append(Start("case", fingerprint, "case", described, *where))
        parts.step.attest_start({"progress": progress.step})
        trainer.run()
        append(End(plan.total_steps, "finished", {}))
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
    inner, case, seen = files or Journal(), parts.case, parts.seen

    def step(batch: GlobalBatch, result: StepResult, record: Step) -> None:
        inner.step(batch, result, record)
        note_result(seen, batch, result.rows, result.rate, result.loss, result.grad_norm)
        for rank, meter in parts.meters.items():
            seen.resting.setdefault(rank, []).append(meter.live)
        if case.stop_after == batch.step:
            raise CutOff

    def checkpoint(progress: Progress, *, best: bool) -> None:
        if case.folder is not None:
            inner.checkpoint(progress, best=best)

    return Proxy(inner, step=step, checkpoint=checkpoint)
