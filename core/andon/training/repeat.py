"""Steps that are done again after a resume give what they gave before the run was interrupted (`resume-exact`).

Every rank reads the same ledger and judges the same step, so all of them end alike where one was not repeated.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from andon.run.ledger import read_ledger, same_again
from andon.step.plan import GlobalBatch, flatten
from andon.step.step import StepResult
from andon_contracts.digest import hex64
from andon_contracts.fields import Real
from andon_contracts.policy import clause, require
from andon_contracts.record import RankPart, Record, Resume, Start, Step, StepDigests
from andon_contracts.violation import Finding

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


class EarlierSteps:
    """Collects, from the records of a ledger in their order, the last one of each step later than `after`.

    Equal bits are promised for one machine model and one set of versions only, so steps done under another
    fingerprint are not comparable and left out. comparable: whether the record that was seen last was done under it.
    """

    def __init__(self, after: int, fingerprint: Mapping[str, str]) -> None:
        self.found: dict[int, Step] = {}
        self.comparable = False
        self._after, self._fingerprint = after, dict(fingerprint)

    def see(self, record: Record) -> None:
        """The next record of the ledger."""
        if isinstance(record, (Start, Resume)):
            self.comparable = dict(record.fingerprint) == self._fingerprint
        elif isinstance(record, Step) and record.step > self._after:
            self.found.pop(record.step, None)
            if self.comparable:
                self.found[record.step] = record


def earlier_steps(ledger: Path, after: int, fingerprint: Mapping[str, str]) -> dict[int, Step]:
    """What `EarlierSteps` collects of this ledger; nothing without one. Raises `LedgerError` for a damaged one."""
    earlier = EarlierSteps(after, fingerprint)
    for record in read_ledger(ledger) if ledger.exists() else ():
        earlier.see(record)
    return earlier.found


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
