"""The history of a run, read from its ledger, and the records of a new step and of a violation.

Every rank reads the same ledger and compares repeated steps with it (`run/repeats`), so if a step does not repeat
exactly, all ranks end with the same error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from andon.console.messages import command_line
from andon.console.problems import InputError
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
    """The run so far, by its ledger, relative to the checkpoint from which it resumes.

    head: the digest of the ledger line that the checkpoint quotes; None if the ledger is shorter. steps: the last
    record of each step after the checkpoint, which will be repeated; without retracted steps and those of another
    machine or other versions, whose bits may differ. retraction: of a violation, if the process ended before writing
    it. violations: the number recorded. evaluated, ended: the final scores and the end, if the process was interrupted
    after writing them on this machine and versions. world, backend: of the last process. last: the last valid update.
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
    """The retraction of updates after `kept`, the last checkpoint's step, up to `last`; None without such updates.

    A clause that is checked only periodically (the frozen base, an audit, a checkpoint read back) may have been broken
    by any update since its last check. All such clauses are checked before a checkpoint, so the steps up to the
    checkpoint are valid and later steps cannot be trusted.
    """
    return Retraction(kept, last, violation.clause, violation.seen) if last > kept else None


def begin_anew(config: Path) -> str:
    """The command that starts the run of `config` from step 0 in another folder."""
    return command_line("andon", "train", config, "--run-dir", "ANOTHER_FOLDER")


def read_history(ledger: Path, fingerprint: Mapping[str, str], checkpoint: Checkpoint | None = None) -> History:
    """The history in `ledger` of a run that resumes from `checkpoint` (None: from step 0); empty without a ledger.

    fingerprint: of this machine and its versions. Only steps after the checkpoint are held in memory. Raises
    `InputError` that names the line of a damaged ledger.
    """
    step, count = (checkpoint.step, checkpoint.head[0]) if checkpoint is not None else (0, 0)
    history = History(head=GENESIS if count == 0 else None)
    if not ledger.exists():
        return history
    comparable, saved = False, 0  # saved: the step of the last checkpoint
    try:
        for number, (record, digest) in enumerate(digested_ledger(ledger), start=1):
            # After the last step's checkpoint come only the final scores (of it or of the best step) and the end.
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
                        history.steps.pop(record.step, None)  # only the latest record of a step counts
                        if comparable:
                            history.steps[record.step] = record
                case Saved():
                    saved = record.step
                case Broken():
                    history.evaluated = history.ended = None
                    history.violations += 1
                    history.retraction = retracted(record, saved, history.last)
                    history.forget_after(saved)  # `last` changes with the retraction's own record
                case Retraction():
                    history.retraction, history.last = None, min(history.last, record.step)
                    history.forget_after(record.step)
                case Evaluation() if closing and record.step <= step == history.last:
                    history.evaluated = record
                case End() if closing and record.step == step and record.reason in ("finished", "early-stopping"):
                    history.ended = record
    except LedgerError as error:
        anew = f"put the file back as it was, or begin anew: {begin_anew(ledger.with_name('config.yaml'))}"
        raise InputError.at("", f"{error}; the run cannot be resumed: {anew}") from error
    if history.retraction is not None:  # the resume writes it first
        history.last = history.retraction.step
    return history


def violation_records(violation: Violation, step: int, weights: int, kept: int, last: int) -> Iterator[Record]:
    """The last records of a run: the violation, its retraction if any, and the end.

    step, weights: the last update and the digest of its weights. kept, last: as for `retracted`.
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
    """The ledger's record of one update, equal on all ranks."""
    placeholders = dict.fromkeys(("content", "gradient", "weights", "optimizer"), UNKNOWN)
    rows = batch.micro_batches(len(result.leaves))
    parts = []
    for rank in range(world_size):
        leaves = tuple(leaf.index for leaf in result.leaves if leaf.rank == rank)
        digests = {name: hex64(value) for name, value in result.ranks[rank].items()} if result.ranks else {}
        ids = tuple(row for leaf in leaves for row in rows[leaf])
        parts.append(RankPart(rank=rank, leaves=leaves, ids=ids, **(digests or {"weights": UNKNOWN})))
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
        digests=StepDigests(**placeholders | {name: hex64(value) for name, value in result.digests.items()}),
        ranks=tuple(parts),
    )
