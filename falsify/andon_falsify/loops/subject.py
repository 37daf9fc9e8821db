"""Anyone's training loop as a subject: run on ranks, and its observations from all ranks as one trace."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence

from andon_falsify.history import read_lines
from andon_falsify.loops.protocol import Make
from andon_falsify.loops.sightings import LoopSightings
from andon_falsify.loops.task import distinct
from andon_falsify.loops.worker import Job
from andon_falsify.ranks.pool import RankPools
from andon_falsify.subjects import witness
from andon_falsify.subjects.case import Case
from andon_falsify.subjects.trace import RankUpdate, Trace, rank_parts


class LoopSubject:
    """Runs cases on the ranks of `pools`, with the loop that `make` returns on each of them.

    make: `package.module:function`, or an importable function. name: what reports call the subject, by default `make`.
    Raises `ValueError` for a function that a rank cannot import.
    """

    def __init__(self, make: str | Make, name: str = "", pools: RankPools | None = None) -> None:
        self.make = make if isinstance(make, str) else _importable(make)
        if not all(self.make.partition(":")):
            msg = f"{self.make!r} names no loop: write package.module:make"
            raise ValueError(msg)
        self.name = name or self.make
        self._pools = RankPools() if pools is None else pools

    def run(self, case: Case) -> Trace:
        """See `Subject.run`. Equal rows are made distinct first: `Trace.case` has the rows as they were used.

        `Trace.errors` has, by rank, errors of the loop and of its import, and ranks that died or did not answer.
        Raises `ValueError` if the rows cannot be made distinct.
        """
        case = case.but(rows=distinct(case.rows, case.longest), backend="gloo")
        search = dict.fromkeys(os.path.abspath(folder) for folder in (*sys.path, os.getcwd()))
        job = Job(self.make, case, tuple(search))
        answers = self._pools.of(case.world).run("andon_falsify.loops.worker:train", job)
        parts = [answer.value for answer in answers if isinstance(answer.value, LoopSightings)]
        errors = {rank: answer.error for rank, answer in enumerate(answers) if answer.error}
        return trace_of(case, [] if errors else parts, errors, self.name)


def _importable(make: Make) -> str:
    module, name = make.__module__, make.__qualname__
    if module == "__main__" or not name.isidentifier():
        msg = f"{module}.{name} cannot be imported by a rank: give `package.module:function`"
        raise ValueError(msg)
    return f"{module}:{name}"


def trace_of(case: Case, parts: Sequence[LoopSightings], errors: Mapping[int, str], name: str) -> Trace:
    """One trace from the observations of each rank, in order of rank."""
    lines = witness.linked(_events(case, parts))
    seen = read_lines(lines, f"{name} world {case.world} accumulation {case.accumulation}")
    return Trace(case, tuple(parts), seen, None, dict(errors))


def _events(case: Case, parts: Sequence[LoopSightings]) -> Iterator[witness.Line]:
    if not parts:
        return
    first, size = parts[0], case.global_batch
    plan = {"batch_size": size, "micro_batches": case.accumulation * case.world, "steps": case.updates(size)}
    yield witness.opening(case, plan, first.start.get(0, ""), first.resumed_from)
    of_epoch = case.updates_of_epoch(size)
    if case.max_steps is None and first.updates and first.updates % case.epochs == 0:
        of_epoch = first.updates // case.epochs  # the loop has made another number of updates than planned
    for step, made in sorted(first.made.items()):
        rows = _in_order([part.of(part.ranks[0], step) for part in parts])
        yield witness.update(
            case,
            step,
            rows,
            rank_parts(parts, step),
            reals={"lr": made.rate, "loss": first.told_losses.get(step), "grad_norm": made.norm},
            kept=step in first.values,
            epoch=(step - 1) // of_epoch,
            count=len(rows),
        )
    broken = next((part.violation for part in parts if part.violation), None)
    yield from witness.ending(case, broken, max(first.made, default=first.resumed_from))


def _in_order(sights: Sequence[RankUpdate]) -> list[int]:
    """The different rows of an update: by micro-batch, by place in it, by rank, as a strided sampler deals them."""
    places = {
        (leaf, place, rank): row
        for rank, sight in enumerate(sights)
        for leaf, rows in enumerate(sight.leaves)
        for place, row in enumerate(rows)
    }
    return list(dict.fromkeys(places[key] for key in sorted(places)))
