"""The laws of what a loop leaves: checkpoints, evaluations, the number of its updates, peaks of memory."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from andon_contracts.laws.law import Law, hexadecimal, unless_all
from andon_contracts.violation import Finding


@dataclass(frozen=True)
class Restored:
    """The digests of a save, and the current ones in memory or on the disk, by name and rank.

    fault: why the current ones are not known, with the `ranks` that have the fault, if they are known.
    """

    saved: Mapping[str, int]
    current: Mapping[str, tuple[int, ...]]
    step: int
    fault: str = ""
    ranks: tuple[int, ...] = ()


def _restored(seen: Restored) -> Finding | None:
    if seen.fault:
        return Finding(seen.fault, seen.step, seen.ranks)
    for name in dict.fromkeys([*seen.saved, *seen.current]):
        if name not in seen.current:
            return Finding(f"{name} was saved and is not there", seen.step, (), name)
        if name not in seen.saved:
            return Finding(f"{name} is there and was not saved", seen.step, (), name)
        saved, current = seen.saved[name], seen.current[name]
        odd = [rank for rank, digest in enumerate(current) if digest != saved]
        if odd:
            now = ", ".join(dict.fromkeys(hexadecimal(current[rank]) for rank in odd))
            what = f"{name} is not what was saved (with digest {hexadecimal(saved)}, now {now})"
            return Finding(what, seen.step, unless_all(odd, len(current)), name)
    return None


RESTORED: tuple[Law[Restored], ...] = (Law("checkpoint-whole/restored", (), _restored),)


@dataclass(frozen=True)
class Evaluation:
    """One evaluation: the ids of all ranks, how many rows there are (None: unknown), metrics reported and recomputed.

    reported: by metric and rank; None if a rank reports nothing. repeated: the same weights gave the same predictions
    for the same rows before. training: by rank, the batch norm that was in training mode in the last forward pass; "":
    none was. planned: the order of the rows of all ranks, end to end; None: any order.
    """

    step: int
    ids: tuple[tuple[int, ...], ...]
    rows: int | None
    reported: Mapping[str, Sequence[float | None]]
    counted: Mapping[str, float]
    repeated: bool = True
    training: tuple[str, ...] = ()
    planned: tuple[int, ...] | None = None


def _evaluated(seen: Evaluation) -> Finding | None:
    wrong = [
        (name, rank, value)
        for name, by_rank in seen.reported.items()
        for rank, value in enumerate(by_rank)
        if value is not None and not math.isclose(value, seen.counted[name], rel_tol=1e-6, abs_tol=1e-9)
    ]
    training = [(rank, name) for rank, name in enumerate(seen.training) if name]
    # If every rank evaluated the same rows by itself, those of one rank count.
    parts = seen.ids[:1] if len(set(seen.ids)) == 1 else seen.ids
    counts = Counter(row for part in parts for row in part)
    twice = [row for row, count in counts.items() if count > 1]
    if twice:
        what = f"rows {twice[:8]} were counted more than once"
    elif seen.rows is not None and len(counts) != seen.rows:
        what = f"{len(counts)} of {seen.rows} rows were counted"
    elif seen.planned is not None and tuple(row for part in seen.ids for row in part) != seen.planned:
        what = f"the {len(counts)} rows that were counted are not the planned ones in their order"
    elif wrong:
        name, rank, value = wrong[0]
        what = f"{name} is told as {value!r} on rank {rank}, the rows give {seen.counted[name]!r}"
    elif training:
        module = training[0][1]
        what = f"batch norm {module} was in training mode: what it gave for a row depended on the rows beside it"
    elif not seen.repeated:
        what = "the same weights gave other predictions for the same rows before"
    else:
        return None
    ranks = [rank for _, rank, _ in wrong] or [rank for rank, _ in training]
    return Finding(what, seen.step, unless_all(ranks, len(seen.ids)), "evaluation")


EVALUATED: tuple[Law[Evaluation], ...] = (Law("evaluation-once/told", (), _evaluated),)


@dataclass(frozen=True)
class Output:
    """A forward pass of `rows` rows without an update. odd: the rows whose output `name` is not finite."""

    name: str
    rows: int
    odd: tuple[int, ...]
    step: int = 0


def _output(seen: Output) -> Finding | None:
    if not seen.odd:
        return None
    of_many = f": {len(seen.odd)} of {seen.rows} rows have none, row {seen.odd[0]} first" if seen.rows > 1 else ""
    return Finding(f"the model gives no finite {seen.name}{of_many}", seen.step, (), seen.name)


OUTPUT: tuple[Law[Output], ...] = (Law("finite/output", (), _output),)
"""NaN or Inf is neither scored nor handed out: as a prediction it would count as some class."""


@dataclass(frozen=True)
class Count:
    """The updates `made` so far, of those `planned`, by a run that is `over` or about to make another."""

    made: int
    planned: int
    over: bool


def _counted(seen: Count) -> Finding | None:
    if seen.made == seen.planned if seen.over else seen.made < seen.planned:
        return None
    step = seen.made if seen.over else seen.made + 1
    what = f"the run ended after {step} updates" if seen.over else f"update {step} is about to be made"
    return Finding(f"{what}, {seen.planned} were planned", step, (), "count of updates")


COUNTED: tuple[Law[Count], ...] = (Law("updates-planned/counted", (), _counted),)


@dataclass(frozen=True)
class Peaks:
    """By rank, the most bytes that its GPU held at once, and how many were planned for any rank."""

    peaks: Sequence[int]
    planned: int
    step: int


def _peaks(seen: Peaks) -> Finding | None:
    over = tuple(rank for rank, peak in enumerate(seen.peaks) if peak > seen.planned * 1.1)
    what = f"{max(seen.peaks)} bytes at the peak, {seen.planned} were planned and a tenth more is allowed"
    return Finding(what, seen.step, over) if over else None


BUDGET: tuple[Law[Peaks], ...] = (Law("memory-budget/peaks", (), _peaks, suspicion=True),)
"""A suspicion, because a plan that is off makes no result wrong."""
