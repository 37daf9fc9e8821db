"""What the ledger of a run tells of it: what was done, and how it ended; and the lines of a new step and a violation.

Every rank reads the same ledger and judges the same step by it (`run/repeats`), so all of them end alike where one was
not repeated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from andon.console.messages import command_line
from andon.console.problems import InputError, Problem
from andon.run.checkpoint import Checkpoint
from andon.run.ledger import LedgerError, digested_ledger
from andon.run.repeats import UNKNOWN
from andon.step.plan import GlobalBatch
from andon.step.step import StepResult
from andon_contracts.digest import hex64
from andon_contracts.fields import Real
from andon_contracts.record import (
    GENESIS,
    Broken,
    End,
    Evaluation,
    RankPart,
    Record,
    Resume,
    Retraction,
    Saved,
    Start,
    Step,
    StepDigests,
)
from andon_contracts.violation import Violation

_CLOSING = ("finished", "early-stopping")


@dataclass
class History:
    """The run so far, as seen from the checkpoint that it goes on from.

    head: the digest of the line that the checkpoint quotes, None where the ledger is shorter. steps: those that will
    be done again, the last record of each, unless that was taken back, or was made on another machine or with other
    versions: equal bits are promised for one of both. retraction: what a violation should have taken back, where the
    process ended before it did, or was of a version that did not. violations: recorded. evaluated, ended: the last
    scores and the end, where the run was interrupted after them on this machine and versions. world, backend: where it
    ran last. kept: the step of the last checkpoint. last: the highest of an update that counts.
    """

    head: str | None = None
    steps: dict[int, Step] = field(default_factory=dict)
    retraction: Retraction | None = None
    violations: int = 0
    evaluated: Evaluation | None = None
    ended: End | None = None
    world: int = 0
    backend: str = ""
    kept: int = 0
    last: int = 0

    def note(self, record: Record, after: int, *, comparable: bool) -> None:
        """Take in the next line. after: the step of the checkpoint. comparable: made on this machine and versions."""
        if isinstance(record, Start | Resume):
            self.world, self.backend = record.world, record.backend
            self.kept = record.step if isinstance(record, Resume) else 0
        elif isinstance(record, Broken):
            self.violations += 1
            self.retraction = retracted(record, self.kept, self.last)
            self._take_back(self.kept)  # `last` stays until a line of the ledger says so
        elif isinstance(record, Retraction):
            self.retraction = None
            self.last = min(self.last, record.step)
            self._take_back(record.step)
        elif isinstance(record, Saved):
            self.kept = record.step
        elif isinstance(record, Step):
            self.last = max(self.last, record.step)
            if record.step > after:
                self.steps.pop(record.step, None)  # done elsewhere later: what was done here before counts no more
                if comparable:
                    self.steps[record.step] = record

    def _take_back(self, kept: int) -> None:
        self.steps = {step: record for step, record in self.steps.items() if step <= kept}


def retracted(violation: Broken, kept: int, last: int) -> Retraction | None:
    """What `violation` takes back of a run with updates up to `last`, whose last checkpoint is of step `kept`, if any.

    A clause that is looked at now and then (the frozen base, an audit, a checkpoint read back) may have been broken
    since any update after the last look, and before each checkpoint all that is looked at is: so what lies behind the
    checkpoint stands, and what lies after it is nobody's truth.
    """
    return Retraction(kept, last, violation.clause, violation.seen) if last > kept else None


def begin_anew(config: Path) -> str:
    """The command that begins the run of `config` anew, in another folder."""
    return command_line("andon", "train", config, "--run-dir", "ANOTHER_FOLDER")


def read_history(ledger: Path, fingerprint: Mapping[str, str], checkpoint: Checkpoint | None = None) -> History:
    """What `ledger` tells of the run that goes on from `checkpoint` (None: that begins anew); nothing without one.

    fingerprint: of this machine and these versions. Every line is read and, but for the steps that are done again, none
    is kept: a run of a million steps is resumed in the memory of one of ten. Raises `InputError` at the line of a
    ledger that is damaged.
    """
    step, count = (checkpoint.step, checkpoint.head[0]) if checkpoint is not None else (0, 0)
    history = History(head=GENESIS if count == 0 else None)
    if not ledger.exists():
        return history
    comparable = False
    try:
        for number, (record, digest) in enumerate(digested_ledger(ledger), start=1):
            if isinstance(record, Start | Resume):
                comparable = dict(record.fingerprint) == dict(fingerprint)
            history.note(record, step, comparable=comparable)
            if number == count:
                history.head = digest
            elif number > count and checkpoint is not None:
                _note_closing(history, record, step, comparable=comparable)
    except LedgerError as error:
        anew = f"put the file back as it was, or begin anew: {begin_anew(ledger.with_name('config.yaml'))}"
        raise InputError([Problem("", f"{error}; the run cannot be resumed: {anew}")]) from error
    if history.retraction is not None:  # which is written before anything else is
        history.last = history.retraction.step
    return history


def _note_closing(history: History, record: Record, step: int, *, comparable: bool) -> None:
    """After the checkpoint of the last step there are only the last scores, of it or of the best step, and the end."""
    if isinstance(record, Step | Broken):
        history.evaluated = history.ended = None
    elif isinstance(record, Evaluation) and record.step <= step == history.last and comparable:
        history.evaluated = record
    elif isinstance(record, End) and record.step == step and record.reason in _CLOSING and comparable:
        history.ended = record


def violation_records(violation: Violation, step: int, weights: int, kept: int, last: int) -> Iterator[Record]:
    """The last lines of a run: the violation, what it takes back, and the end.

    step: the update that was done last. weights: the digest of what it left. kept, last: see `retracted`.
    """
    finding = violation.finding
    broken = Broken(
        clause=violation.clause or "unnamed",
        step=finding.step,
        ranks=finding.ranks,
        tensor=finding.tensor,
        seen=finding.seen,
        details=dict(finding.details),
        applied=0 < finding.step <= step or None,
    )
    yield broken
    taken_back = retracted(broken, kept, max(step, last))
    if taken_back is not None:
        yield taken_back
    yield End(step, "violation", {"weights": hex64(weights)}, violations=1)


def step_record(batch: GlobalBatch, result: StepResult, world_size: int, backend: str) -> Step:
    """The ledger's record of one update: the same on every rank."""
    unknown = dict.fromkeys(("content", "gradient", "weights", "optimizer"), UNKNOWN)
    rows = batch.micro_batches(len(result.leaves))
    parts = []
    for rank in range(world_size):
        leaves = tuple(leaf.index for leaf in result.leaves if leaf.rank == rank)
        held = {name: hex64(value) for name, value in result.ranks[rank].items()} if result.ranks else {}
        ids = tuple(row for leaf in leaves for row in rows[leaf])
        parts.append(RankPart(rank=rank, leaves=leaves, ids=ids, **(held or {"weights": UNKNOWN})))
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
        terms=result.terms if result.terms != result.rows else None,
        world=world_size,
        backend=backend,
        digests=StepDigests(**unknown | {name: hex64(value) for name, value in result.digests.items()}),
        ranks=tuple(parts),
    )
