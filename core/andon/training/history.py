"""What the ledger of a run tells of it: which steps were done before, and how it ended; and the line of a new step.

Steps that are done again after a resume give what they gave before the run was interrupted (`resume-exact`). Every rank
reads the same ledger and judges the same step, so all of them end alike where one was not repeated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from andon.console.problems import InputError, Problem
from andon.run.checkpoint import Checkpoint
from andon.run.ledger import LedgerError, digested_ledger, same_again
from andon.step.plan import GlobalBatch, flatten
from andon.step.step import StepResult
from andon_contracts.digest import hex64
from andon_contracts.fields import Real
from andon_contracts.policy import clause, require
from andon_contracts.record import (
    GENESIS,
    Broken,
    End,
    Evaluation,
    RankPart,
    Record,
    Resume,
    Saved,
    Start,
    Step,
    StepDigests,
)
from andon_contracts.violation import Finding

_CLOSING = ("finished", "early-stopping")
UNKNOWN = "0" * 16
"""The digest of what was not looked at, because the contracts were off."""


def _explain(step: int, differences: tuple[str, ...]) -> Finding:
    return Finding(seen=f"the step was done before with other results: {'; '.join(differences)}", step=step)


@clause("resume-exact", _explain)
def _repeated_exactly(step: int, differences: tuple[str, ...]) -> bool:
    """A step that is done again gives what it gave."""
    return not differences


@require(_repeated_exactly)
def require_repeated(step: int, differences: tuple[str, ...]) -> None:
    """Nothing differs between both records of `step`. Raises `Violation` (`resume-exact`)."""


class Repeats:
    """The records of steps that an interrupted run did after the point from which it goes on."""

    def __init__(self, earlier: Mapping[int, Step] | None = None) -> None:
        self._earlier = dict(earlier or {})

    def judge(self, record: Step) -> None:
        """Raises `Violation` (`resume-exact`) where `record` is of a step that was done before with other results."""
        earlier = self._earlier.pop(record.step, None)
        if earlier is not None and UNKNOWN not in (earlier.digests.weights, record.digests.weights):
            require_repeated(record.step, same_again(earlier, record))


@dataclass
class History:
    """The run so far, as seen from the checkpoint that it goes on from.

    head: the digest of the line that the checkpoint quotes, None where the ledger is shorter. steps: those that will
    be done again, the last record of each, unless that was made on another machine or with other versions: equal bits
    are promised for one of both. violations: recorded. best: the steps of checkpoints that were the best when they were
    saved. evaluated, ended: the last scores and the end, where the run was interrupted after them on this machine and
    versions. world, backend: where it ran last.
    """

    head: str | None = None
    steps: dict[int, Step] = field(default_factory=dict)
    violations: int = 0
    best: list[int] = field(default_factory=list)
    evaluated: Evaluation | None = None
    ended: End | None = None
    world: int = 0
    backend: str = ""


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
            _note(history, record, step, comparable=comparable)
            if number == count:
                history.head = digest
            elif number > count and checkpoint is not None:
                _note_closing(history, record, step, comparable=comparable)
    except LedgerError as error:
        raise InputError([Problem("", f"{error}; the run cannot be resumed")]) from error
    return history


def _note(history: History, record: Record, after: int, *, comparable: bool) -> None:
    if isinstance(record, Start | Resume):
        history.world, history.backend = record.world, record.backend
    elif isinstance(record, Broken):
        history.violations += 1
    elif isinstance(record, Saved) and record.best:
        history.best.append(record.step)
    elif isinstance(record, Step) and record.step > after:
        history.steps.pop(record.step, None)  # done elsewhere later: what was done here before counts no more
        if comparable:
            history.steps[record.step] = record


def _note_closing(history: History, record: Record, step: int, *, comparable: bool) -> None:
    """After the checkpoint of the last step there are only the scores of the rows never trained on, and the end."""
    if isinstance(record, Step | Broken):
        history.evaluated = history.ended = None
    elif isinstance(record, Evaluation) and record.step == step and comparable:
        history.evaluated = record
    elif isinstance(record, End) and record.step == step and record.reason in _CLOSING and comparable:
        history.ended = record


def step_record(batch: GlobalBatch, result: StepResult, world_size: int, backend: str) -> Step:
    """The ledger's record of one update: the same on every rank."""
    digests = {name: hex64(value) for name, value in result.digests.items()}
    unknown = dict.fromkeys(("content", "gradient", "weights", "optimizer"), UNKNOWN)
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
        world=world_size,
        backend=backend,
        digests=StepDigests(**{**unknown, **digests}),
        ranks=_parts(batch, result, world_size),
    )


def _parts(batch: GlobalBatch, result: StepResult, world_size: int) -> tuple[RankPart, ...]:
    rows = batch.micro_batches(len(result.leaves))
    owned: dict[int, list[int]] = {rank: [] for rank in range(world_size)}
    for leaf in result.leaves:
        owned[leaf.rank].append(leaf.index)
    held = [{name: hex64(value) for name, value in digests.items()} for digests in result.ranks]
    return tuple(
        RankPart(
            rank=rank,
            leaves=tuple(leaves),
            ids=flatten([rows[index] for index in leaves]),
            **(held[rank] if held else {"weights": UNKNOWN}),
        )
        for rank, leaves in owned.items()
    )
