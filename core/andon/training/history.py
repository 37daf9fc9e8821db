"""What a run's ledger tells of the run so far, and the records of a new step and a violation.

Every rank reads the same ledger and compares a repeated step with it (`run/repeats`), so all ranks end alike if one is
not repeated exactly.
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


@dataclass
class History:
    """The run so far, as its ledger tells it to the checkpoint that the run goes on from.

    head: the digest of the line that the checkpoint quotes; None if the ledger is shorter. steps: those that will be
    done again, the last record of each, unless it was taken back, or was made on another machine or with other
    versions, whose bits may differ. retraction: of a violation that the process ended too early to write. violations:
    the number recorded. evaluated, ended: the last scores and the end, if the run was interrupted after them on this
    machine and versions. world, backend: where it ran last. last: the highest update that counts.
    """

    head: str | None = None
    steps: dict[int, Step] = field(default_factory=dict)
    retraction: Retraction | None = None
    violations: int = 0
    evaluated: Evaluation | None = None
    ended: End | None = None
    world: int = 0
    backend: str = ""
    last: int = 0

    def forget_after(self, step: int) -> None:
        self.steps = {number: record for number, record in self.steps.items() if number <= step}


def retracted(violation: Broken, kept: int, last: int) -> Retraction | None:
    """What `violation` takes back of a run with updates up to `last` and its last checkpoint of step `kept`, if any.

    A clause that is only checked now and then (the frozen base, an audit, a checkpoint read back) may have been broken
    by any update after its last check. Every such clause is checked before a checkpoint, so the steps up to the
    checkpoint stand and the steps after it cannot be trusted.
    """
    return Retraction(kept, last, violation.clause, violation.seen) if last > kept else None


def begin_anew(config: Path) -> str:
    """The command that begins the run of `config` anew, in another folder."""
    return command_line("andon", "train", config, "--run-dir", "ANOTHER_FOLDER")


def read_history(ledger: Path, fingerprint: Mapping[str, str], checkpoint: Checkpoint | None = None) -> History:
    """What `ledger` tells of the run that goes on from `checkpoint` (None: that begins anew); nothing without one.

    fingerprint: of this machine and these versions. Only the steps that are done again are held in memory. Raises
    `InputError` at the line of a ledger that is damaged.
    """
    step, count = (checkpoint.step, checkpoint.head[0]) if checkpoint is not None else (0, 0)
    history = History(head=GENESIS if count == 0 else None)
    if not ledger.exists():
        return history
    comparable, saved = False, 0  # saved: the step of the last checkpoint
    try:
        for number, (record, digest) in enumerate(digested_ledger(ledger), start=1):
            # After the checkpoint of the last step come only the last scores, of it or of the best step, and the end.
            closing = checkpoint is not None and number > count and comparable
            if number == count:
                history.head = digest
            match record:
                case Start() | Resume():
                    comparable = dict(record.fingerprint) == dict(fingerprint)
                    history.world, history.backend = record.world, record.backend
                    saved = record.step if isinstance(record, Resume) else 0
                case Step():
                    history.evaluated = history.ended = None
                    history.last = max(history.last, record.step)
                    if record.step > step:
                        history.steps.pop(record.step, None)  # the latest record counts, even from another machine
                        if comparable:
                            history.steps[record.step] = record
                case Saved():
                    saved = record.step
                case Broken():
                    history.evaluated = history.ended = None
                    history.violations += 1
                    history.retraction = retracted(record, saved, history.last)
                    history.forget_after(saved)  # `last` stays until the retraction is in the ledger
                case Retraction():
                    history.retraction, history.last = None, min(history.last, record.step)
                    history.forget_after(record.step)
                case Evaluation() if closing and record.step <= step == history.last:
                    history.evaluated = record
                case End() if closing and record.step == step and record.reason in ("finished", "early-stopping"):
                    history.ended = record
    except LedgerError as error:
        anew = f"put the file back as it was, or begin anew: {begin_anew(ledger.with_name('config.yaml'))}"
        raise InputError([Problem("", f"{error}; the run cannot be resumed: {anew}")]) from error
    if history.retraction is not None:  # it is written before anything else is
        history.last = history.retraction.step
    return history


def violation_records(violation: Violation, step: int, weights: int, kept: int, last: int) -> Iterator[Record]:
    """The last records of a run: the violation, what it takes back, and the end.

    step, weights: the last update and the digest of its weights. kept, last: see `retracted`.
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
