"""One run in one process: from a checked configuration to a finished run folder.

With a process group every rank runs this; without one this process holds all ranks. Only rank 0 writes files.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from andon.backend.base import Backend
from andon.backend.devices import IN_PROCESS, placement
from andon.backend.group import GroupBackend
from andon.backend.inprocess import InlineBackend, ThreadsBackend
from andon.config.identity import config_digest, differences, identity
from andon.config.schema import Config
from andon.exits import Exit
from andon.metrics.scores import Scores
from andon.model.adapter import attach
from andon.model.build import build_base
from andon.problems import InputError, Problem
from andon.run.checkpoint import Checkpoint, newest_valid
from andon.run.folder import RunFolder, State
from andon.run.ledger import LedgerWriter, digests_by_step
from andon.run.provenance import environment, fingerprint
from andon.step.replica import OptimizerSpec, Replica
from andon.step.schedule import WarmupCosine
from andon.step.state import restore_state, state_tensors
from andon.step.step import TrainingStep
from andon.training.evaluation import evaluate
from andon.training.journal import FolderJournal, SilentJournal, progress_from, say
from andon.training.material import Material, prepare
from andon.training.outputs import Result, write_adapter, write_results, write_start
from andon.training.progress import ProgressView
from andon.training.replicas import build_replicas
from andon.training.trainer import Journal, Outcome, Progress, Trainer
from andon_contracts.digest import hex64
from andon_contracts.fields import Real
from andon_contracts.policy import reset_evaluations, suspended
from andon_contracts.record import Broken, End, Plan, Resume, Start
from andon_contracts.violation import Violation


@dataclass
class Session:
    """The parts of one run, put together."""

    config: Config
    folder: RunFolder
    material: Material
    backend: Backend
    replicas: list[Replica]
    step: TrainingStep
    environment: Mapping[str, Any]
    started: float
    initial_weights: int = 0

    @property
    def writes(self) -> bool:
        """Whether this process is the one that writes files."""
        return self.backend.ranks[0] == 0

    @property
    def models(self) -> list[nn.Module]:
        """The model of each local replica."""
        return [replica.model for replica in self.replicas]

    @property
    def primary(self) -> Replica:
        """The first local replica; all are equal."""
        return self.replicas[0]


class AlreadyFinished(Exception):  # noqa: N818 - not an error: there is nothing left to do
    """The run in this folder has reached its end."""


def train(config: Config, folder: RunFolder, stop_asked: Callable[[], bool]) -> Exit:
    """Run, or resume, the training that `config` describes in `folder`; returns `Exit.OK` or `Exit.PREEMPTED`.

    Raises `InputError` for what the user got wrong, `Violation` on every rank alike for what the system did.
    """
    reset_evaluations()
    with assembled(config, folder) as session:
        try:
            return _run(session, stop_asked)
        except AlreadyFinished:
            if session.writes:
                say(f"resume: the run in {folder.path} is finished, nothing to do")
            return Exit.OK


@contextmanager
def assembled(config: Config, folder: RunFolder) -> Iterator[Session]:
    """The parts of a run on this process's backend; rank 0 owns the run folder meanwhile. Nothing is trained yet."""
    started = time.perf_counter()
    with ExitStack() as stack:
        if not config.contracts.enabled:
            stack.enter_context(suspended())
        backend = stack.enter_context(_backend(config))
        if backend.ranks[0] == 0:
            stack.enter_context(folder.open_for_writing())
        yield _assemble(config, folder, backend, started)


@contextmanager
def _backend(config: Config) -> Iterator[Backend]:
    """The configured backend; in a rank process it joins the process group, and leaves it at the end."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True)
    name, devices, note = placement(config.run.backend, config.run.workers, config.run.devices)
    if name in IN_PROCESS:
        backend: Backend = (InlineBackend if name == "inline" else ThreadsBackend)(devices)
        try:
            yield backend
        finally:
            backend.close()
        return
    kinds = "cpu:gloo,cuda:nccl" if name == "nccl" else "gloo"
    dist.init_process_group(kinds, timeout=timedelta(seconds=config.run.timeout_s))
    rank, world = dist.get_rank(), dist.get_world_size()
    if note and rank == 0:
        say(note)
    if world != config.run.workers:
        raise InputError([Problem("run.workers", f"{config.run.workers} were asked for, {world} ranks were started")])
    device = devices[rank]
    if device.type == "cuda":
        torch.cuda.set_device(device)
    yield GroupBackend(name, device)


def _assemble(config: Config, folder: RunFolder, backend: Backend, started: float) -> Session:
    material = prepare(config)
    model = attach(build_base(material.model), material.adapter, config.seed)
    optimizer = config.optimizer
    spec = OptimizerSpec(
        optimizer.name, tuple(optimizer.betas), optimizer.eps, optimizer.weight_decay, optimizer.momentum
    )
    sample = material.plan.ids[0]
    replicas = build_replicas(model, backend, spec, config.seed, material.task, sample)
    step = TrainingStep(backend, replicas, material.task, config.training.micro_batches, optimizer.clip_norm)
    return Session(config, folder, material, backend, replicas, step, environment(), started)


def _run(session: Session, stop_asked: Callable[[], bool]) -> Exit:
    session.initial_weights = session.primary.weights_digest()
    checkpoint = _restore(session)
    progress = progress_from(checkpoint.state) if checkpoint is not None else Progress()
    base_digest = session.primary.base_digest()
    session.step.attest_start(_start_digests(session, progress))
    journal: FolderJournal | SilentJournal = SilentJournal()
    if session.writes:
        journal = _open_journal(session, checkpoint, progress)
    try:
        outcome = _trainer(session, journal, stop_asked, base_digest).run(progress)
        scores = _final_scores(session) if outcome.reason != "preempted" else None
        if isinstance(journal, FolderJournal):
            _finish(session, journal, outcome, scores)
    except Violation as violation:
        if isinstance(journal, FolderJournal):
            _record_violation(session, journal, violation)
        raise
    finally:
        journal.close()
    return Exit.PREEMPTED if outcome.reason == "preempted" else Exit.OK


def _trainer(session: Session, journal: Journal, stop_asked: Callable[[], bool], base_digest: int) -> Trainer:
    config, material = session.config, session.material
    validation = material.rows.validation_ids
    return Trainer(
        backend=session.backend,
        replicas=session.replicas,
        step=session.step,
        plan=material.plan,
        schedule=WarmupCosine(
            config.optimizer.lr, material.plan.total_steps, config.schedule.warmup_fraction, config.schedule.min_lr
        ),
        journal=journal,
        evaluate=(lambda: evaluate(session.backend, session.models, material.task, validation))
        if validation
        else None,
        stop_asked=stop_asked,
        base_digest=base_digest,
        patience=config.training.early_stopping_patience,
        checkpoint_every=config.training.checkpoint_every,
        evaluate_every=config.training.evaluate_every,
        base_every=config.contracts.base_every,
    )


_ANEW, _DONE = -1, -2


def _restore(session: Session) -> Checkpoint | None:
    """Where rank 0 decides to resume, every rank loads that checkpoint; the start is agreed on by digests.

    Raises `AlreadyFinished` on every rank where there is nothing left to do.
    """
    chosen = _chosen(session) if session.writes else None
    step = _ANEW if chosen is None else chosen.step
    if session.writes and session.folder.state() is State.FINISHED:
        step = _DONE
    answers = session.backend.gather([torch.tensor([step], device=d) for d in session.backend.devices])
    step = int(answers[0])
    if step == _DONE:
        raise AlreadyFinished
    if step == _ANEW:
        return None
    if chosen is None:
        chosen = _loaded(session.folder, step)
    for replica in session.replicas:
        restore_state(replica, chosen.tensors, chosen.step)
    session.initial_weights = int(str(chosen.state["initial_weights"]), 16)
    return chosen


def _loaded(folder: RunFolder, step: int) -> Checkpoint:
    found, _ = newest_valid(folder.checkpoints)
    if found is None or found.step != step:
        raise InputError([Problem(str(folder.checkpoints), f"this rank cannot read the checkpoint of step {step}")])
    return found


def _chosen(session: Session) -> Checkpoint | None:
    """What rank 0 resumes from; None to start anew. Raises `InputError` for a run that was not asked to be resumed."""
    state = session.folder.state()
    if session.config.run.resume == "auto":
        return None if state is State.FINISHED else _newest(session)
    if session.folder.ledger.exists():
        raise InputError(
            [Problem(str(session.folder.path), "already holds a run; add --resume auto, or name another folder")]
        )
    return None


def _newest(session: Session) -> Checkpoint | None:
    """The newest valid checkpoint, if what defines the run is still the same; says what it found in one line."""
    checkpoint, rejected = newest_valid(session.folder.checkpoints)
    for reason in rejected:
        say(f"resume: rejected {reason}")
    if checkpoint is None:
        say("resume: no checkpoint, starting anew")
        return None
    changed = differences(checkpoint.state["identity"], _identity(session))
    if changed:
        raise InputError(
            Problem(f"config {key}", f"was {was!r} when the run began, is {now!r}; a resumed run keeps it")
            for key, was, now in changed
        )
    say(f"resume: from {checkpoint.path.name}, {checkpoint.step} of {session.material.plan.total_steps} steps done")
    return checkpoint


def _identity(session: Session) -> dict[str, Any]:
    return {**identity(session.config), "data": session.material.rows.digest, "labels": list(session.material.labels)}


def _number(text: str) -> int:
    """64 bits of SHA-256 of a text, to compare texts of ranks as integers."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def _start_digests(session: Session, progress: Progress) -> dict[str, int]:
    """What must be the same on all ranks before the first step, as integers by name."""
    return {
        "configuration": _number(config_digest(session.config)),
        "data": _number(session.material.rows.digest),
        "tokenizer": _number(session.material.tokenizer.digest),
        "versions": _number(repr(sorted(fingerprint(session.environment).items()))),
        "optimizer": session.primary.optimizer_digest(),
        "progress": _number(repr(progress)),
    }


def _open_journal(session: Session, checkpoint: Checkpoint | None, progress: Progress) -> FolderJournal:
    """The folder's files, opened, with a start or a resume record as the next line of the ledger."""
    material, config = session.material, session.config
    ledger = LedgerWriter(session.folder.ledger)
    journal = FolderJournal(
        folder=session.folder,
        ledger=ledger,
        tensors=lambda: state_tensors(session.primary),
        fixed_state={"identity": _identity(session), "initial_weights": hex64(session.initial_weights)},
        view=ProgressView(material.plan.total_steps, config.run.log_every, config.run.progress, progress.step),
        backend=session.backend.name,
        world_size=session.backend.world_size,
        earlier={} if ledger.head[0] == 0 else digests_by_step(session.folder.ledger, after=progress.step),
        keep=config.training.keep_checkpoints,
    )
    digests = {
        "weights": hex64(session.primary.weights_digest()),
        "base": hex64(session.primary.base_digest()),
        "data": hex64(_number(material.rows.digest)),
    }
    marks = {name: str(value) for name, value in fingerprint(session.environment).items()}
    if ledger.head[0] == 0:
        plan = Plan(
            rows=len(material.plan.ids),
            batch_size=material.plan.batch_size,
            micro_batches=material.plan.micro_batches,
            seed=material.plan.seed,
            epochs=material.plan.epochs,
            steps=material.plan.total_steps,
        )
        run = session.folder.path.name
        journal.append(
            Start(run, marks, config_digest(config), plan, digests, session.backend.world_size, session.backend.name)
        )
    else:
        journal.append(
            Resume(
                step=progress.step,
                identity=config_digest(config),
                fingerprint=marks,
                digests=digests,
                world=session.backend.world_size,
                backend=session.backend.name,
                name=checkpoint.path.name if checkpoint is not None else None,
                torn=ledger.torn,
            )
        )
    write_start(session.folder, config, session.environment, material, digests)
    return journal


def _final_scores(session: Session) -> Scores:
    material = session.material
    return evaluate(session.backend, session.models, material.evaluation_task, material.evaluation_ids)


def _finish(session: Session, journal: FolderJournal, outcome: Outcome, scores: Scores | None) -> None:
    """Export the adapter, close the ledger's account, write the summary last."""
    progress = outcome.progress
    if scores is not None:
        journal.evaluated(progress.step, session.material.plan.epochs - 1, scores, "held-out")
        write_adapter(session.folder, session.primary.model, session.material)
    weights = hex64(session.primary.weights_digest())
    journal.append(
        End(
            step=progress.step,
            reason=outcome.reason,
            digests={"weights": weights},
            final_loss=Real.of(progress.last_loss),
        )
    )
    _write_summary(session, journal, progress, outcome.reason, scores)


def _write_summary(
    session: Session, journal: FolderJournal, progress: Progress, reason: str, scores: Scores | None, violations: int = 0
) -> None:
    result = Result(
        reason=reason,
        steps=progress.step,
        best_step=progress.best_step,
        last_loss=progress.last_loss,
        world_size=session.backend.world_size,
        backend=session.backend.name,
        weights_digest=hex64(session.primary.weights_digest()),
        initial_weights_digest=hex64(session.initial_weights),
        ledger_head=journal.head,
        wall_s=time.perf_counter() - session.started,
        violations=violations,
    )
    write_results(session.folder, session.environment, result, scores)


def _record_violation(session: Session, journal: FolderJournal, violation: Violation) -> None:
    """The last lines of the ledger; the last checkpoint stays what it was."""
    finding = violation.finding
    journal.append(
        Broken(
            clause=violation.clause or "unnamed",
            step=finding.step,
            ranks=finding.ranks,
            tensor=finding.tensor,
            seen=finding.seen,
            details=dict(finding.details),
        )
    )
    journal.append(End(step=max(finding.step - 1, 0), reason="violation", digests={}, violations=1))
    reached = Progress(step=max(finding.step - 1, 0))
    _write_summary(session, journal, reached, "violation", None, violations=1)
