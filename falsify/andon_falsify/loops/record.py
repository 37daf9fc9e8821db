"""What all ranks of a loop saw as one history, in the schema of a ledger and through the same reader."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from andon_falsify.history import read_lines
from andon_falsify.loops.sightings import LoopSightings
from andon_falsify.subjects import witness
from andon_falsify.subjects.case import Case
from andon_falsify.subjects.trace import Sight, Trace, rank_parts


def trace_of(case: Case, parts: Sequence[LoopSightings], errors: Mapping[int, str], name: str) -> Trace:
    """One trace from what each rank saw. `parts` begins with rank 0."""
    lines = witness.linked(_events(case, parts))
    seen = read_lines(lines, f"{name} world {case.world} accumulation {case.accumulation}")
    return Trace(case, tuple(parts), seen, None, dict(errors))


def _events(case: Case, parts: Sequence[LoopSightings]) -> Iterator[witness.Line]:
    if not parts:
        return
    first = parts[0]
    plan = {
        "batch_size": case.global_batch,
        "micro_batches": case.accumulation * case.world,
        "steps": case.updates(case.global_batch),
    }
    yield witness.opening(case, plan, first.start.get(0, ""), first.resumed_from)
    for step, made in sorted(first.made.items()):
        rows = in_order([part.of(part.ranks[0], step) for part in parts])
        yield witness.update(
            case,
            step,
            rows,
            rank_parts(parts, step),
            reals={"lr": made.rate, "loss": first.told_losses.get(step), "grad_norm": made.norm},
            kept=step in first.values,
            epoch=_epoch(case, first, step),
            count=len(rows),
        )
    broken = next((part.violation for part in parts if part.violation), None)
    yield from witness.ending(case, broken, max(first.made, default=first.resumed_from))


def in_order(sights: Sequence[Sight]) -> list[int]:
    """The different rows of an update: by micro-batch, in it by place, then by rank, as a strided sampler deals."""
    longest = max((len(sight.leaves) for sight in sights), default=0)
    found: dict[int, None] = {}
    for leaf in range(longest):
        held = [sight.leaves[leaf] for sight in sights if leaf < len(sight.leaves)]
        for place in range(max(map(len, held), default=0)):
            found |= dict.fromkeys(rows[place] for rows in held if place < len(rows))
    return list(found)


def _epoch(case: Case, first: LoopSightings, step: int) -> int:
    """The epoch of an update: all epochs have equally many, if the loop's count allows it, else as many as planned."""
    each = case.updates_of_epoch(case.global_batch)
    if case.max_steps is None and first.updates and first.updates % case.epochs == 0:
        each = first.updates // case.epochs
    return (step - 1) // each
