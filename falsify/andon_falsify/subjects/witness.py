"""What the witness writes of a run that it looked at: lines of the record's schema, by a writer of its own.

It shares no code with whoever writes a ledger in the trainer or in a watch, so that a fault there cannot make both tell
the same; that their reader accepts every line of this one is a test. What was not seen is left out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from andon_falsify.history import chain_digest
from andon_falsify.subjects.case import Case

WRITER = "witness"
VERSION = 4
_DIGESTS = dict.fromkeys(("weights", "gradient", "optimizer"), "sha256")
"""Of names, types, shapes and bytes; nothing that the accused computes."""

Line = dict[str, Any]


def opening(case: Case, plan: Mapping[str, int], weights: str, resumed_from: int) -> Line:
    """The first line: of a run that took up another one after `resumed_from` updates, or of a new one (0).

    weights: their digest before the first update, "" where it is not known. plan: what is to be done, by the schema's
    names; each epoch visits every row of `case`.
    """
    common = {
        "fingerprint": {},
        "identity": "case",
        "digests": _known({"weights": weights}),
        "world": case.world,
        "backend": case.backend,
        "writer": WRITER,
        "algorithms": _DIGESTS,
    }
    if resumed_from:
        return {"kind": "resume", "step": resumed_from, **common}
    rows = len(case.items)
    planned = {"rows": rows, "ids": list(range(rows)), "seed": case.seed, "epochs": case.epochs, **plan}
    return {"kind": "start", "run": "case", "plan": planned, **common}


def rank_part(rank: int, leaves: Iterable[Sequence[int]], digests: Mapping[str, str]) -> Line:
    """What one rank did in an update: the rows of its micro-batches, and the digests of what it then held."""
    return {"rank": rank, "leaves": [], "ids": [row for leaf in leaves for row in leaf], **_known(digests)}


def update(
    case: Case,
    step: int,
    ids: Sequence[int],
    ranks: Sequence[Line],
    *,
    reals: Mapping[str, float | None],
    kept: bool,
    **numbers: int,
) -> Line:
    """One update. reals: learning rate, loss and norm as far as they are known. kept: whether its tensors are.

    The whole's digests are those of rank 0, whose tensors are referred to by the number of the update.
    """
    held = {name: ranks[0][name] for name in _DIGESTS if ranks and name in ranks[0]}
    found = {
        "kind": "step",
        "step": step,
        "ids": list(ids),
        **numbers,
        **{
            name: {"value": value if math.isfinite(value) else None, "hex": float(value).hex()}
            for name, value in reals.items()
            if value is not None
        },
        "world": case.world,
        "backend": case.backend,
        "digests": held,
        "ranks": list(ranks),
    }
    return found | ({"tensors": {name: f"{step}/{name}" for name in ("gradients", "weights")}} if kept else {})


def ending(case: Case, broken: tuple[str, int, str] | None, reached: int) -> list[Line]:
    """How it ended: by a violation (clause, step, message), after the update `reached`, or cut off, without a word."""
    if broken is not None:
        clause, step, message = broken
        return [{"kind": "violation", "clause": clause, "step": step, "ranks": [], "tensor": "", "seen": message}]
    return (
        [] if case.stop_after is not None else [{"kind": "end", "step": reached, "reason": "finished", "digests": {}}]
    )


def linked(events: Iterable[Line]) -> list[bytes]:
    """The lines of `events`, each with the digest of the one before."""
    lines: list[bytes] = []
    prev = "0" * 16
    for seq, event in enumerate(events):
        lines.append(json.dumps({"v": VERSION, "seq": seq, "prev": prev, **event}).encode() + b"\n")
        prev = chain_digest(lines[-1].removesuffix(b"\n"))
    return lines


def _known(digests: Mapping[str, str]) -> dict[str, str]:
    return {name: digest for name, digest in digests.items() if digest}
