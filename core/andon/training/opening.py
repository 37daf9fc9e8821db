"""How a run begins, or goes on: all ranks alike, what it starts from written down, its files open."""

from __future__ import annotations

import hashlib

from andon.config.identity import config_digest
from andon.messages import say
from andon.model.masks import Masking, masking_of
from andon.problems import InputError, Problem
from andon.run.checkpoint import Checkpoint
from andon.run.ledger import LedgerError, LedgerWriter
from andon.run.provenance import fingerprint
from andon.step.audit import describe
from andon.step.state import state_tensors
from andon.training.journal import FolderJournal, MetricsWriter, SilentJournal
from andon.training.material import idleness
from andon.training.outputs import write_start
from andon.training.progress import ProgressView
from andon.training.resume import Standpoint, run_identity
from andon.training.session import Session, audit_spec
from andon.training.standing import Standing
from andon.training.trainer import Journal, Progress
from andon_contracts.digest import hex64
from andon_contracts.record import Plan, Record, Resume, Start


def agree_on_start(session: Session, progress: Progress) -> None:
    """Every rank starts from the same state, data, versions and place in the plan. Raises `Violation` on all ranks."""
    session.step.attest_start(
        {
            "configuration": _number(config_digest(session.config)),
            "data": _number(session.material.rows.digest),
            "tokenizer": _number(session.material.tokenizer.digest),
            "versions": _number(repr(sorted(_versions(session).items()))),
            "attention": _number(_masking(session)),
            "optimizer": session.primary.optimizer_digest(),
            "progress": _number(repr(progress)),
        }
    )


def _versions(session: Session) -> dict[str, str]:
    """What every rank must have alike; in `mixed` without what only ranks on GPUs have."""
    common: dict[str, object] = (
        {"devices": [], "driver": None, "sources": {}} if session.backend.name == "mixed" else {}
    )
    return fingerprint({**session.environment, **common})


def _masking(session: Session) -> str:
    """How the model is told who sees whom, which each rank finds out by itself; in `mixed` ranks on CPUs are told
    otherwise than those on GPUs. Where the host will have to wait for a GPU it is said."""
    if session.backend.name == "mixed":
        return ""
    found = masking_of(session.primary.model, session.primary.device)
    if session.writes and session.primary.device.type == "cuda" and found is Masking.TOKENS:
        say("this model takes the mask of tokens, at which the host waits for the GPU once a pass")
    return found.name


def _number(text: str) -> int:
    """64 bits of SHA-256 of a text, to compare texts of ranks as integers."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def open_journal(session: Session, standpoint: Standpoint, progress: Progress) -> Journal:
    """Where this rank writes what happens. On rank 0 what the run starts from is on disk before the ledger's line.

    A ledger that has the run's end already gets no line: only what is written after it may lack. Raises `InputError`
    for a disk that refuses and for a ledger that is damaged.
    """
    if not session.writes:
        return SilentJournal()
    folder, config = session.folder, session.config
    digests = _named_digests(session)
    write_start(folder, config, session.environment, session.material, digests)
    try:
        ledger = LedgerWriter(folder.ledger)
    except LedgerError as error:
        raise InputError([Problem("", str(error))]) from error
    if ledger.head[0] == 0:
        ledger.append(_start(session))
    elif standpoint.past.ended is None:
        ledger.append(_resume(session, standpoint.checkpoint, progress, ledger.torn))
    else:
        say("resume: the ledger has the end of this run; what is written after it is written again")
    _announce(session, progress.step)
    return FolderJournal(
        folder=folder,
        ledger=ledger,
        metrics=MetricsWriter(folder.metrics, progress.step),
        view=ProgressView(session.material.plan.total_steps, config.run.log_every, config.run.progress, progress.step),
        tensors=lambda: state_tensors(session.primary),
        fixed_state={"identity": run_identity(session), "fingerprint": fingerprint(session.environment)},
        keep=config.training.keep_checkpoints,
        standing=Standing.of(
            folder, standpoint, progress.best_step, passing_over=config.run.on_save_error == "continue"
        ),
    )


def _named_digests(session: Session) -> dict[str, str]:
    return {"initial_weights": hex64(session.initial_weights), "base": hex64(session.base)}


def _state_digests(session: Session) -> dict[str, str]:
    return {
        "weights": hex64(session.primary.weights_digest()),
        "base": hex64(session.base),
        "data": hex64(_number(session.material.rows.digest)),
    }


def _start(session: Session) -> Record:
    plan = session.material.plan
    return Start(
        run=session.folder.path.name,
        fingerprint=fingerprint(session.environment),
        identity=config_digest(session.config),
        plan=Plan(
            rows=len(plan.ids),
            batch_size=plan.batch_size,
            micro_batches=plan.micro_batches,
            seed=plan.seed,
            epochs=plan.epochs,
            steps=plan.total_steps,
        ),
        digests=_state_digests(session),
        world=session.backend.world_size,
        backend=session.backend.name,
    )


def _resume(session: Session, checkpoint: Checkpoint | None, progress: Progress, torn: int) -> Record:
    return Resume(
        step=progress.step,
        identity=config_digest(session.config),
        fingerprint=fingerprint(session.environment),
        digests=_state_digests(session),
        world=session.backend.world_size,
        backend=session.backend.name,
        name=checkpoint.path.name if checkpoint is not None else None,
        torn=torn,
    )


def _audit(session: Session, done: int) -> str:
    """What is audited; where none of the steps after the first `done` is due, that too."""
    spec, last = audit_spec(session.config, session.backend.world_size), session.material.plan.total_steps
    shown = describe(spec, session.backend.world_size)
    if not spec.every or done == last or any(map(spec.due, range(done + 1, last + 1))):
        return shown
    return f"{shown}; none falls into steps {done + 1} to {last}"


def _announce(session: Session, done: int) -> None:
    """What a reader is told first. done: steps that are behind it."""
    material, backend = session.material, session.backend
    plan = material.plan
    say(
        f"training on {len(plan.ids)} rows, {plan.total_steps} steps of {plan.batch_size} rows in "
        f"{plan.micro_batches} micro-batches, {backend.world_size} {backend.name} workers"
    )
    idle = idleness(plan, session.config, backend.world_size)
    if idle:
        say(f"warning: {idle}")
    if not session.config.training.exact:
        say("training.exact=false: each worker computes its rows at once; the bits depend on the number of workers")
    if session.config.contracts.enabled:
        say(_audit(session, done))
    seen = material.rows.seen_in_training()
    if seen:
        total = len(material.rows.evaluated_on)
        say(f"warning: {seen} of {total} evaluation rows have a text that is also trained on; their scores flatter")
    if material.tokenizer.truncated:
        limit = session.config.model.max_length
        say(f"note: {material.tokenizer.truncated} texts were cut to {limit} tokens (model.max_length)")
