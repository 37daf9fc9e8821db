"""Where a run goes on from: rank 0 decides, every rank loads the same checkpoint or none."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from andon.config.identity import differences, identity
from andon.config.load import load_config
from andon.messages import say
from andon.problems import InputError, Problem
from andon.run.checkpoint import Checkpoint, load_checkpoint, newest_valid
from andon.run.folder import State
from andon.run.ledger import LedgerError, head_at, read_ledger
from andon.run.provenance import differences as other_machine
from andon.run.provenance import fingerprint, read_provenance
from andon.run.sealed import CheckpointError
from andon.step.state import restore_state
from andon.step.step import RankFailed
from andon.training.repeat import Repeats, earlier_steps
from andon.training.session import Session
from andon_contracts.digest import hex64

_ANEW, _DONE, _REFUSED = -1, -2, -3
"""What rank 0 may answer instead of the step of a checkpoint."""


class AlreadyFinished(Exception):
    """The run in this folder has reached its end."""


def run_identity(session: Session) -> dict[str, Any]:
    """What defines the run: the configuration's identity, and digests of all that it only names."""
    material = session.material
    return identity(session.config) | {
        "data": material.rows.digest,
        "labels": list(material.labels),
        "tokenizer": material.tokenizer.digest,
        "base": hex64(session.base),
        "initial_weights": hex64(session.initial_weights),
    }


def restore(session: Session) -> Checkpoint | None:
    """Load the checkpoint that rank 0 chose into every replica; None for a run that starts anew.

    Raises `AlreadyFinished` on every rank where nothing is left to do, and `InputError` on rank 0 (`RankFailed` on
    the others) for a run that was not asked to be resumed, or that was another one.
    """
    chosen, answer, error = None, _ANEW, None
    if session.writes:
        try:
            chosen, answer = _choice(session)
        except InputError as refused:
            error, answer = refused, _REFUSED
    backend = session.backend
    answer = int(backend.gather([torch.tensor([answer], device=device) for device in backend.devices])[0])
    if error is not None:
        raise error
    if answer == _REFUSED:
        raise RankFailed("rank 0 refused to start, and says why")
    if answer == _DONE:
        raise AlreadyFinished
    if answer == _ANEW:
        return None
    found = chosen if chosen is not None else _loaded(session, answer)
    for replica in session.replicas:
        restore_state(replica, found.tensors, found.step)
    return found


def repeats_after(session: Session, step: int) -> Repeats:
    """The steps after `step` that the ledger has already: doing them again must give the same.

    Raises `InputError` at the line of a ledger that is damaged.
    """
    try:
        return Repeats(earlier_steps(session.folder.ledger, step, fingerprint(session.environment)))
    except LedgerError as error:
        raise _damaged(error) from error


def _damaged(error: LedgerError) -> InputError:
    return InputError([Problem("", f"{error}; the run cannot be resumed")])


def _loaded(session: Session, step: int) -> Checkpoint:
    path = session.folder.checkpoints / f"step-{step:08d}"
    try:
        return load_checkpoint(path)
    except CheckpointError as error:
        raise InputError([Problem(str(path), f"this rank cannot read it: {error}")]) from error


def _choice(session: Session) -> tuple[Checkpoint | None, int]:
    """What rank 0 resumes from, as the checkpoint and the answer to the others."""
    folder = session.folder
    if session.config.run.resume != "auto":
        if folder.begun():
            raise InputError([Problem(str(folder.path), "holds a run; add --resume auto, or name another folder")])
        return None, _ANEW
    if folder.state() is State.FINISHED:
        return None, _DONE
    _check_ledger(session)
    checkpoint, rejected = newest_valid(folder.checkpoints)
    for reason in rejected:
        say(f"resume: rejected {reason}")
    _require_same_run(session, checkpoint)
    if checkpoint is None:
        say("resume: no checkpoint, starting anew")
        return None, _ANEW
    _require_its_ledger(session, checkpoint)
    total = session.material.plan.total_steps
    say(f"resume: from {checkpoint.path.name}, {checkpoint.step} of {total} steps done")
    return checkpoint, checkpoint.step


def _check_ledger(session: Session) -> None:
    """Every line is read and none is kept: a run of a million steps is resumed in the memory of one of ten."""
    if session.folder.ledger.exists():
        try:
            deque(read_ledger(session.folder.ledger), maxlen=0)
        except LedgerError as error:
            raise _damaged(error) from error
    if not session.folder.provenance.exists():
        return
    was = read_provenance(session.folder.provenance)
    changed = other_machine(was.fingerprint, fingerprint(session.environment))
    if changed:
        say(f"resume: other machine or versions ({'; '.join(changed)}): the bits may differ from an uninterrupted run")


def _require_same_run(session: Session, checkpoint: Checkpoint | None) -> None:
    was = checkpoint.state["identity"] if checkpoint is not None else identity_at_start(session)
    changed = differences(was, run_identity(session)) if was is not None else []
    if changed:
        raise InputError(
            Problem(key, f"was {before!r} when the run began, is {now!r}; a resumed run keeps what defines it")
            for key, before, now in changed
        )


def identity_at_start(session: Session) -> dict[str, Any] | None:
    """The identity of a run that has no checkpoint yet, from what it wrote when it began; None where it did not."""
    folder = session.folder
    if not (folder.ledger.exists() and folder.provenance.exists() and folder.config.exists()):
        return None
    was = read_provenance(folder.provenance)
    named = {name: was.digest(name) for name in ("data", "tokenizer", "base", "initial_weights")}
    return identity(load_config(folder.config)) | named | {"labels": list(session.material.labels)}


def _require_its_ledger(session: Session, checkpoint: Checkpoint) -> None:
    count, digest = checkpoint.head
    ledger = session.folder.ledger
    if (head_at(ledger, count) if ledger.exists() else None) != digest:
        raise InputError(
            [Problem(str(checkpoint.path), f"line {count} of {ledger.name} is not the one that it quotes")]
        )
