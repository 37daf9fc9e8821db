"""Where a run goes on from: rank 0 decides, every rank loads the same checkpoint or none."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from andon.config.identity import differences, identity
from andon.console.messages import say
from andon.console.problems import InputError, Problem
from andon.run.checkpoint import Checkpoint, CheckpointError, load_checkpoint, newest_valid
from andon.run.folder import State
from andon.run.provenance import differences as other_machine
from andon.run.provenance import fingerprint, read_provenance
from andon.step.pending import UNSIGNED
from andon.step.step import RankFailed
from andon.training.existing import config_of, require_same_as_finished
from andon.training.history import History, begin_anew, read_history
from andon.training.session import Session
from andon.training.trainer import Progress
from andon_contracts.digest import hex64, signed
from andon_contracts.laws.law import Judgement, enforce
from andon_contracts.laws.update import RESTORED, Restored

_ANEW, _DONE, _REFUSED = -1, -2, -3
"""What rank 0 may answer instead of the step of a checkpoint."""
_MOST_REJECTED = 5
"""Lines on rejected checkpoints, the newest first."""


@dataclass(frozen=True)
class Standpoint:
    """Where a run goes on from: a checkpoint (None: it begins anew), and what its ledger tells of before."""

    checkpoint: Checkpoint | None
    history: History


class AlreadyFinished(Exception):
    """The run in this folder has reached its end."""


def run_identity(session: Session) -> dict[str, Any]:
    """What defines the run: the configuration's identity, and digests of all that it only names."""
    material = session.material
    return identity(session.config) | {
        "data": material.rows.digest,
        "labels": list(material.labels),
        "tokenizer": material.tokenizer.digest,
        "base": hex64(session.run.base),
        "initial_weights": hex64(session.run.initial_weights),
    }


def restore(session: Session) -> Standpoint:
    """Load the checkpoint that rank 0 chose into every replica, and read the ledger, once on every rank.

    Raises `AlreadyFinished` on every rank where nothing is left to do, and `InputError` on rank 0 (`RankFailed` on
    the others) for a run that was not asked to be resumed, that was another one, or whose ledger is damaged.
    """
    chosen, answer, error = None, _ANEW, None
    if session.run.writes:
        try:
            chosen, answer = _choice(session)
        except InputError as refused:
            error, answer = refused, _REFUSED
    backend = session.run.backend
    # Also where rank 0 refuses: the others wait here, and would not learn why.
    answer = int(backend.gather([torch.tensor([answer], device=device) for device in backend.devices])[0])
    if error is not None:
        raise error
    if answer == _REFUSED:
        raise RankFailed("rank 0 refused to start, and says why")
    if answer == _DONE:
        raise AlreadyFinished
    if chosen is None:
        checkpoint = None if answer == _ANEW else _loaded(session, answer)
        chosen = Standpoint(checkpoint, _history(session, checkpoint))
    if chosen.checkpoint is not None:
        session.run.restore(chosen.checkpoint)
    return chosen


def load_best(session: Session, progress: Progress) -> None:
    """Load the weights of the best step into every replica. Collective.

    Raises `InputError` on a rank that cannot read the checkpoint (`RankFailed` on the others), and
    `Violation` on all ranks if one has other weights than the run recorded for that step (`checkpoint-whole`).
    """
    run, step, error = session.run, progress.best_step, None
    try:
        run.load_weights(_loaded(session, step))
    except InputError as refused:
        again = f"put it back; or move away all checkpoints from step {step} on and resume: their steps are done again"
        error = InputError([replace(each, what=f"{each.what}; {again}") for each in refused.problems])
    read = [torch.tensor([error is None, signed(each.weights_digest())], device=each.device) for each in run.replicas]
    readable, digests = zip(*(each.tolist() for each in run.backend.gather(read)), strict=True)
    if error is not None:
        raise error
    if not all(readable):
        raise RankFailed(f"rank {readable.index(0)} could not read the best checkpoint, of step {step}")
    found = tuple(digest % UNSIGNED for digest in digests)
    recorded = progress.best_weights or found[0]  # 0: contracts were off there
    enforce(Judgement(RESTORED, Restored({"weights": recorded}, {"weights": found}, step)))


def _history(session: Session, checkpoint: Checkpoint | None) -> History:
    return read_history(session.folder.ledger, fingerprint(session.environment), checkpoint)


def _loaded(session: Session, step: int) -> Checkpoint:
    path = session.folder.checkpoints / f"step-{step:08d}"
    try:
        return load_checkpoint(path)
    except CheckpointError as error:
        raise InputError([Problem(str(path), f"this rank cannot read it: {error}")]) from error


def _choice(session: Session) -> tuple[Standpoint | None, int]:
    """What rank 0 resumes from, and the answer to the others; None where there is nothing to be read of before."""
    folder = session.folder
    if session.config.run.resume != "auto":
        if folder.begun():
            raise InputError([Problem(str(folder.path), "holds a run; add --resume auto, or name another folder")])
        return None, _ANEW
    if folder.state() is State.FINISHED:
        require_same_as_finished(session.config, folder)
        return None, _DONE
    checkpoint, rejected = newest_valid(folder.checkpoints)
    history = _history(session, checkpoint)
    _tell_of_other_machine(session)
    for reason in rejected[:_MOST_REJECTED]:
        say(f"resume: rejected {reason}")
    if len(rejected) > _MOST_REJECTED:
        say(f"resume: rejected {len(rejected) - _MOST_REJECTED} more of {folder.checkpoints}")
    if checkpoint is not None:  # before the settings are compared: another run's checkpoint has other settings
        _require_its_ledger(session, checkpoint, history)
    _require_same_run(session, checkpoint)
    if checkpoint is None:
        say("resume: no checkpoint, starting anew")
        return Standpoint(None, history), _ANEW
    total = session.material.plan.total_steps
    say(
        f"resume: from {checkpoint.path.name}, {checkpoint.step} of {total} steps done{_other_number(session, history)}"
    )
    return Standpoint(checkpoint, history), checkpoint.step


def _other_number(session: Session, history: History) -> str:
    now = session.run.backend.world_size
    return f", on {history.world} workers; now there are {now}" if history.world not in (0, now) else ""


def _tell_of_other_machine(session: Session) -> None:
    if not session.folder.provenance.exists():
        return
    try:
        was = read_provenance(session.folder.provenance)
    except InputError as error:
        again = "put it back as it was, or remove it: it is then written again"
        raise InputError([replace(each, what=f"{each.what}; {again}") for each in error.problems]) from error
    changed = other_machine(was.fingerprint, fingerprint(session.environment))
    if changed:
        say(f"resume: other machine or versions ({'; '.join(changed)}): the bits may differ from an uninterrupted run")


def _require_same_run(session: Session, checkpoint: Checkpoint | None) -> None:
    was = identity_of(checkpoint) if checkpoint is not None else identity_at_start(session)
    changed = differences(was, run_identity(session)) if was is not None else []
    if changed:
        raise InputError(
            Problem(key, f"was {before!r} when the run began, is {now!r}; a resumed run keeps what defines it")
            for key, before, now in changed
        )


def identity_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """The identity of the run that wrote `checkpoint`. Raises `InputError` where its state has none."""
    found = checkpoint.state.get("identity")
    if not isinstance(found, dict):
        what = "its state does not say what run it is of; move it away, to go on from the one before it"
        raise InputError([Problem(str(checkpoint.path), what)])
    return found


def identity_at_start(session: Session) -> dict[str, Any] | None:
    """The identity of a run that has no checkpoint yet, from what it wrote when it began; None where it did not."""
    folder = session.folder
    if not (folder.ledger.exists() and folder.provenance.exists() and folder.config.exists()):
        return None
    was = read_provenance(folder.provenance)
    named = {name: was.digest(name) for name in ("data", "tokenizer", "base", "initial_weights")}
    return identity(config_of(folder)) | named | {"labels": list(session.material.labels)}


def _require_its_ledger(session: Session, checkpoint: Checkpoint, history: History) -> None:
    count, digest = checkpoint.head
    if history.head != digest:
        ledger = session.folder.ledger
        what = (
            f"line {count} of {ledger.name} is not the one that it quotes: the checkpoint is of another run, or lines "
            f"of {ledger} were lost. Put the ledger back as it was; or move this checkpoint away, to go on from the "
            f"one before it; or begin anew: {begin_anew(session.folder.config)}"
        )
        raise InputError([Problem(str(checkpoint.path), what)])
