"""What all ranks of a loop saw as one history, in the schema of a ledger and through the same reader."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from andon_falsify.history import chain_digest, read_lines
from andon_falsify.loops.sightings import LoopSightings
from andon_falsify.subjects.case import Case
from andon_falsify.subjects.trace import Sight, Trace


def global_batch(case: Case) -> int:
    """Rows of an update: what the ranks' micro-batches add up to."""
    return case.local_batch * case.accumulation * case.world


def planned_updates(case: Case) -> int:
    """Updates of the whole case: every epoch ends with what is left of its rows."""
    all_epochs = -(-len(case.rows) // global_batch(case)) * case.epochs
    return all_epochs if case.max_steps is None else min(all_epochs, case.max_steps)


def trace_of(case: Case, parts: Sequence[LoopSightings], errors: Mapping[int, str], name: str) -> Trace:
    """One trace from what each rank saw. `parts` begins with rank 0."""
    lines, prev = [], "0" * 16
    for seq, event in enumerate(_events(case, parts)):
        lines.append(json.dumps({"v": 1, "seq": seq, "prev": prev, **event}).encode() + b"\n")
        prev = chain_digest(lines[-1].removesuffix(b"\n"))
    seen = read_lines(lines, f"{name} world {case.world} accumulation {case.accumulation}")
    return Trace(case, tuple(parts), seen, None, dict(errors))


def _events(case: Case, parts: Sequence[LoopSightings]) -> list[dict[str, Any]]:
    if not parts:
        return []
    first = parts[0]
    made = sorted(first.made)
    events = [_opening(case, first), *(_step(case, parts, step) for step in made)]
    broken = next((part.violation for part in parts if part.violation), None)
    if broken is not None:
        events.append({"kind": "violation", "clause": broken[0], "step": broken[1]})
    elif case.stop_after is None:
        events.append({"kind": "end", "step": max(made, default=first.resumed_from), "reason": "finished"})
    return events


def _opening(case: Case, first: LoopSightings) -> dict[str, Any]:
    if first.resumed_from:
        return {"kind": "resume", "step": first.resumed_from}
    plan = {
        "rows": len(case.rows),
        "ids": list(range(len(case.rows))),
        "batch_size": global_batch(case),
        "micro_batches": case.accumulation * case.world,
        "seed": case.seed,
        "epochs": case.epochs,
        "steps": planned_updates(case),
    }
    return {"kind": "start", "plan": plan, "initial": {"weights": first.start.get(0, "")}}


def _step(case: Case, parts: Sequence[LoopSightings], step: int) -> dict[str, Any]:
    first = parts[0]
    sights = [part.of(part.ranks[0], step) for part in parts]
    rows = in_order(sights)
    ranks = [
        {
            "rank": sight.rank,
            "ids": [row for leaf in sight.leaves for row in leaf],
            "weights": sight.weights,
            "optimizer": sight.optimizer,
            "gradient": sight.gradient,
        }
        for sight in sights
    ]
    made, loss = first.made[step], first.told_losses.get(step)
    event: dict[str, Any] = {
        "kind": "step",
        "step": step,
        "epoch": _epoch(case, first, step),
        "ids": rows,
        "count": len(rows),
        "lr": {"value": made.rate, "hex": made.rate.hex()},
        "world": case.world,
        "backend": case.backend,
        "digests": {name: ranks[0][name] for name in ("weights", "optimizer", "gradient") if ranks[0][name]},
        "ranks": ranks,
    }
    told = {"loss": loss, "grad_norm": made.norm}
    return event | {name: _real(value) for name, value in told.items() if value is not None}


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
    each = -(-len(case.rows) // global_batch(case))
    if case.max_steps is None and first.updates and first.updates % case.epochs == 0:
        each = first.updates // case.epochs
    return (step - 1) // each


def _real(value: float) -> dict[str, Any]:
    finite = value == value and abs(value) != float("inf")
    return {"value": value if finite else None, "hex": float(value).hex()}
