"""The clauses about what a loop leaves: checkpoints, evaluations, the number of its updates. Pure functions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from andon_contracts.policy import clause, ensure
from andon_contracts.violation import Finding


def _explain_restored(name: str, saved: int, found: Mapping[str, tuple[int, ...]], step: int) -> Finding:
    odd = tuple(rank for rank, digest in enumerate(found[name]) if digest != saved)
    return Finding(
        f"{name} is not what was saved ({saved % (1 << 64):016x})",
        step,
        odd if len(odd) < len(found[name]) else (),
        name,
    )


def _first_unrestored(saved: Mapping[str, int], found: Mapping[str, tuple[int, ...]]) -> str | None:
    return next((name for name, digest in saved.items() if any(d != digest for d in found.get(name, (None,)))), None)


def _explain_whole(saved: Mapping[str, int], found: Mapping[str, tuple[int, ...]], step: int) -> Finding:
    name = _first_unrestored(saved, found)
    assert name is not None
    if name not in found:
        return Finding(f"{name} was saved and is not there", step, (), name)
    return _explain_restored(name, saved[name], found, step)


@clause("checkpoint-whole", _explain_whole)
def checkpoint_whole(saved: Mapping[str, int], found: Mapping[str, tuple[int, ...]], step: int) -> bool:
    """Everything that was digested at the save has that digest on every rank."""
    return _first_unrestored(saved, found) is None


@ensure(checkpoint_whole)
def judge_restored(
    saved: Mapping[str, int], found: Mapping[str, tuple[int, ...]], step: int
) -> Mapping[str, tuple[int, ...]]:
    """What is live, or on the disk, is what was saved, by name. Raises `Violation`."""
    return found


@dataclass(frozen=True)
class EvaluationTold:
    """One evaluation: the ids of all ranks, how many rows there are (None: unknown), metrics told and recomputed."""

    step: int
    ids: tuple[tuple[int, ...], ...]
    rows: int | None
    told: Mapping[str, Sequence[float | None]]
    """By metric, what each rank reports; None where it reports nothing."""
    counted: Mapping[str, float]
    repeated: bool = True
    """Whether the same rows had the same predictions when the same weights were evaluated before."""
    training: tuple[str, ...] = ()
    """By rank, the batch norm that was in training mode when the model was last called for it; "" for none."""


def _wrong_metrics(told: EvaluationTold) -> list[tuple[str, int, float]]:
    return [
        (name, rank, value)
        for name, by_rank in told.told.items()
        for rank, value in enumerate(by_rank)
        if value is not None and not math.isclose(value, told.counted[name], rel_tol=1e-6, abs_tol=1e-9)
    ]


def _evaluation_fault(told: EvaluationTold) -> str:
    counts = Counter(row for part in told.ids for row in part)
    twice = [row for row, count in counts.items() if count > 1]
    if twice:
        return f"rows {twice[:8]} were counted more than once"
    if told.rows is not None and len(counts) != told.rows:
        return f"{len(counts)} of {told.rows} rows were counted"
    for name, rank, value in _wrong_metrics(told):
        return f"{name} is told as {value!r} on rank {rank}, the rows give {told.counted[name]!r}"
    for name in filter(None, told.training):
        return f"batch norm {name} was in training mode: what it gave for a row depended on the rows beside it"
    return "" if told.repeated else "the same weights gave other predictions for the same rows before"


def _explain_evaluation(told: EvaluationTold) -> Finding:
    training = {rank for rank, name in enumerate(told.training) if name}
    ranks = tuple(sorted({rank for _, rank, _ in _wrong_metrics(told)} or training))
    return Finding(_evaluation_fault(told), told.step, ranks if len(ranks) < len(told.ids) else (), "evaluation")


@clause("evaluation-once", _explain_evaluation)
def evaluated_once(told: EvaluationTold) -> bool:
    """Each row counted once, metrics from the rows' counts, the same predictions for the same weights, no batch norm
    in training mode.
    """
    return not _evaluation_fault(told)


@ensure(evaluated_once)
def judge_evaluation(told: EvaluationTold) -> EvaluationTold:
    """An evaluation that counts what it says. Raises `Violation`."""
    return told


def _explain_count(made: int, planned: int, *, over: bool) -> Finding:
    seen = f"the run ended after {made} updates" if over else f"update {made + 1} is about to be made"
    return Finding(f"{seen}, {planned} were planned", made if over else made + 1, (), "count of updates")


@clause("updates-planned", _explain_count)
def count_planned(made: int, planned: int, *, over: bool) -> bool:
    """A run that is over has made the planned number of updates, one that is not has made fewer."""
    return made == planned if over else made < planned


@ensure(count_planned)
def judge_count(*, made: int, planned: int, over: bool) -> int:
    """As many updates as planned: `made` so far, and the run is `over` or about to make another. Raises `Violation`."""
    return made
