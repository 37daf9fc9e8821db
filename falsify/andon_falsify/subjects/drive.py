"""One case on one backend in this process: assemble, plant what is to be planted, train, and tell what was seen."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from andon.backend.base import Backend
from andon.run.checkpoint import newest_valid
from andon.run.ledger import LedgerWriter
from andon.step.state import restore_state
from andon.training.repeat import Repeats, earlier_steps
from andon.training.trainer import Progress, Trainer
from andon_contracts.digest import hex64
from andon_contracts.policy import suspended
from andon_contracts.record import Broken, End, Plan, Resume, Start
from andon_contracts.violation import Violation
from andon_falsify.subjects.assembly import Parts, describe, frozen_of, in_process, put_together
from andon_falsify.subjects.case import Case
from andon_falsify.subjects.meter import StorageMeter
from andon_falsify.subjects.placing import devices_of, place_of_bits
from andon_falsify.subjects.trace import Sightings, digest
from andon_falsify.subjects.watching import CutOff, WatchedJournal, WatchedStep, state_digests, watch_gradients


def drive(case: Case, backend: Backend, *, late: bool | None = None) -> Sightings:
    """Run `case` on `backend` (closed afterwards) and return what this process saw. late: see `TrainingStep`.

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
        if case.fault is not None:
            from andon_falsify.faults.registry import named

            named(case.fault).plant(parts, stack)
        describe(parts)
        watch_gradients(parts)
        folder = Path(case.folder or stack.enter_context(tempfile.TemporaryDirectory(prefix="andon-falsify-")))
        if meters:
            _adopt(parts, meters)
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


def _adopt(parts: Parts, meters: dict[int, StorageMeter]) -> None:
    for rank, replica in parts.by_rank.items():
        flat = replica.parameters
        meters[rank].adopt([*replica.model.parameters(), *replica.model.buffers(), flat.weights, flat.gradient])


def _train(parts: Parts, folder: Path, meters: dict[int, StorageMeter]) -> None:
    """From the newest checkpoint in `folder`, or from the start."""
    writes = parts.backend.ranks[0] == 0
    progress = _restored(parts, folder)
    repeats = Repeats(earlier_steps(folder / "ledger.jsonl", progress.step, _fingerprint(parts)))
    # All ranks have read the ledger before rank 0 goes on writing it.
    parts.backend.gather([torch.zeros(1, device=device) for device in parts.backend.devices])
    ledger = LedgerWriter(folder / "ledger.jsonl") if writes else None
    step = WatchedStep(parts)
    journal = WatchedJournal(parts, step, ledger, folder / "checkpoints", meters)
    try:
        journal.append(_opening(parts, progress))
        _run(parts, step, journal, progress, repeats)
        journal.append(End(parts.plan.total_steps, "finished", {}))
    except Violation as violation:
        finding = violation.finding
        clause = violation.clause or "unnamed"
        parts.seen.violation = (clause, finding.step, str(violation))
        journal.append(Broken(clause, finding.step, finding.ranks, finding.tensor, finding.seen))
        journal.append(End(max(finding.step - 1, 0), "violation", {}, violations=1))
    except CutOff:
        pass
    finally:
        journal.close()


def _fingerprint(parts: Parts) -> dict[str, str]:
    """All runs of a suite are of one machine and one set of versions: bits are comparable where devices are alike."""
    return {"machine": "this one", "devices": parts.seen.place}


def _run(parts: Parts, step: WatchedStep, journal: WatchedJournal, progress: Progress, repeats: Repeats) -> None:
    step.attest_start({"progress": progress.step})
    Trainer(
        backend=parts.backend,
        step=step,  # type: ignore[arg-type]
        plan=parts.plan,
        schedule=parts.schedule,
        journal=journal,
        evaluate=None,
        stop_asked=_never,
        base_digest=parts.replicas[0].base_digest(),
        repeats=repeats,
        progress=progress,
        weights=parts.replicas[0].weights_digest(),
        checkpoint_every=parts.case.checkpoint_every,
        base_every=2,
    ).run()


def _never() -> bool:
    return False


def _restored(parts: Parts, folder: Path) -> Progress:
    checkpoints = folder / "checkpoints"
    checkpoints.mkdir(exist_ok=True, parents=True)
    found, rejected = newest_valid(checkpoints)
    if rejected:
        raise RuntimeError("; ".join(rejected))
    if found is None:
        return Progress()
    for replica in parts.replicas:
        restore_state(replica, found.tensors, found.step)
    parts.seen.resumed_from = found.step
    return Progress(step=found.step)


def _opening(parts: Parts, progress: Progress) -> Start | Resume:
    plan, replica = parts.plan, parts.replicas[0]
    digests = {"weights": hex64(replica.weights_digest()), "base": hex64(replica.base_digest())}
    world, name = parts.backend.world_size, parts.backend.name
    if progress.step:
        return Resume(progress.step, "case", _fingerprint(parts), digests, world, name)
    described = Plan(len(plan.ids), plan.batch_size, plan.micro_batches, plan.seed, plan.epochs, plan.total_steps)
    return Start("case", _fingerprint(parts), "case", described, digests, world, name)


def _finish(parts: Parts, folder: Path, meters: dict[int, StorageMeter]) -> None:
    """What is left after the last update that was begun; one that was stopped has changed nothing."""
    for rank, replica in parts.by_rank.items():
        parts.seen.final[rank] = state_digests(replica)
        parts.seen.frozen[rank] = (parts.seen.frozen[rank][0], digest(frozen_of(replica.model)))
        if rank in meters:
            parts.seen.peaks[rank] = meters[rank].peak
    if parts.backend.ranks[0] == 0:
        parts.seen.ledger = (folder / "ledger.jsonl").read_bytes()
