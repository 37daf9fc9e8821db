"""What the ledger of a run says of it before it goes on: every line verified, in one reading."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from andon.problems import InputError, Problem
from andon.run.checkpoint import Checkpoint
from andon.run.ledger import LedgerError, digested_ledger
from andon.run.provenance import fingerprint
from andon.training.repeat import EarlierSteps
from andon.training.session import Session
from andon_contracts.record import GENESIS, Broken, End, Evaluation, Record, Resume, Saved, Start, Step

_CLOSING = ("finished", "early-stopping")


@dataclass
class Past:
    """The run so far, as seen from the checkpoint that it goes on from.

    head: the digest of the line that the checkpoint quotes, None where the ledger is shorter. steps: those that will
    be done again. violations: recorded. best: the steps of checkpoints that were the best when they were saved.
    evaluated, ended: the last scores and the end, where the run was interrupted after them under this fingerprint.
    world, backend: where it ran last.
    """

    head: str | None = None
    steps: Mapping[int, Step] = field(default_factory=dict)
    violations: int = 0
    best: list[int] = field(default_factory=list)
    evaluated: Evaluation | None = None
    ended: End | None = None
    world: int = 0
    backend: str = ""


def read_past(session: Session, checkpoint: Checkpoint | None) -> Past:
    """What the ledger tells of the run that goes on from `checkpoint` (None: that begins anew); nothing without one.

    Every line is read and, but for the steps that are done again, none is kept: a run of a million steps is resumed in
    the memory of one of ten. Raises `InputError` at the line of a ledger that is damaged.
    """
    step, count = (checkpoint.step, checkpoint.head[0]) if checkpoint is not None else (0, 0)
    earlier = EarlierSteps(step, fingerprint(session.environment))
    past = Past(head=GENESIS if count == 0 else None, steps=earlier.found)
    if not session.folder.ledger.exists():
        return past
    try:
        for number, (record, digest) in enumerate(digested_ledger(session.folder.ledger), start=1):
            earlier.see(record)
            _note(past, record)
            if number == count:
                past.head = digest
            elif number > count and checkpoint is not None:
                _note_closing(past, record, step, comparable=earlier.comparable)
    except LedgerError as error:
        raise InputError([Problem("", f"{error}; the run cannot be resumed")]) from error
    return past


def _note(past: Past, record: Record) -> None:
    if isinstance(record, Start | Resume):
        past.world, past.backend = record.world, record.backend
    elif isinstance(record, Broken):
        past.violations += 1
    elif isinstance(record, Saved) and record.best:
        past.best.append(record.step)


def _note_closing(past: Past, record: Record, step: int, *, comparable: bool) -> None:
    """After the checkpoint of the last step there are only the scores of the rows never trained on, and the end."""
    if isinstance(record, Step | Broken):
        past.evaluated = past.ended = None
    elif isinstance(record, Evaluation) and record.step == step and comparable:
        past.evaluated = record
    elif isinstance(record, End) and record.step == step and record.reason in _CLOSING and comparable:
        past.ended = record
