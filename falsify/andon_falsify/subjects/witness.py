"""The witness's own writer: what was observed of a run as lines of the ledger's schema.

It shares no code with the writer of a trainer's ledger, so that one fault cannot make both report the same. A test has
their reader accept every line of this one. What was not observed is left out.
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
"""Over names, types, shapes and bytes; the trainer computes none of them."""

Line = dict[str, Any]


def opening(case: Case, plan: Mapping[str, int], weights: str, resumed_from: int) -> Line:
    """The first line: of a new run, or of one resumed after `resumed_from` updates.

    weights: their digest before the first update, "" if unknown. plan: by the schema's names; each epoch visits every
    item of `case`.
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
    """What one rank did in an update: the rows of its micro-batches, and the digests of its state after it."""
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
    """One update, with the digests of rank 0. reals: learning rate, loss and norm, None if unknown.

    kept: whether rank 0's tensors were recorded; the line refers to them by the number of the update.
    """
    found = {
        "kind": "step",
        "step": step,
        "ids": list(ids),
        **numbers,
        **{name: _real(value) for name, value in reals.items() if value is not None},
        "world": case.world,
        "backend": case.backend,
        "digests": {name: ranks[0][name] for name in _DIGESTS if ranks and name in ranks[0]},
        "ranks": list(ranks),
    }
    return found | ({"tensors": {name: f"{step}/{name}" for name in ("gradients", "weights")}} if kept else {})


def _real(value: float) -> Line:
    return {"value": value if math.isfinite(value) else None, "hex": float(value).hex()}


def ending(case: Case, broken: tuple[str, int, str] | None, reached: int) -> list[Line]:
    """The last line: a violation (clause, step, message), an end after update `reached`, or none if it was cut off."""
    if broken is not None:
        clause, step, message = broken
        return [{"kind": "violation", "clause": clause, "step": step, "ranks": [], "tensor": "", "seen": message}]
    finished = {"kind": "end", "step": reached, "reason": "finished", "digests": {}}
    return [finished] if case.stop_after is None else []


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
