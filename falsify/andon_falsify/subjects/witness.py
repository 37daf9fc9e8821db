"""The witness's own writer: what was observed of a run as lines of the ledger's schema.

It shares no code with the writer of a trainer's ledger, so that one fault cannot make both report the same. A test has
their reader accept every line of this one. What was not observed is left out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from andon_falsify.history import chain_digest
from andon_falsify.subjects.case import Case

if TYPE_CHECKING:
    from andon_falsify.subjects.trace import Observations, RankUpdate

WRITER = "witness"
VERSION = 4
_DIGESTS = dict.fromkeys(("weights", "gradient", "optimizer"), "sha256")
"""Over names, types, shapes and bytes; the trainer computes none of them."""
_REALS = ("lr", "loss", "grad_norm")

Line = Mapping[str, Any]


def lines(case: Case, parts: Sequence[Observations], updates: Iterable[Line], plan: Mapping[str, int]) -> list[bytes]:
    """The run of `case`, each line with the digest of the one before; nothing without `parts`.

    parts: of each process, beginning with that of rank 0. updates: what was reported of each, by the schema's names;
    None if unknown. plan: by the schema's names; each epoch visits every item of `case`.
    """
    found: list[bytes] = []
    prev = "0" * 16
    for seq, event in enumerate(_events(case, parts, updates, plan) if parts else ()):
        found.append(json.dumps({"v": VERSION, "seq": seq, "prev": prev, **event}).encode() + b"\n")
        prev = chain_digest(found[-1].removesuffix(b"\n"))
    return found


def _events(
    case: Case, parts: Sequence[Observations], updates: Iterable[Line], plan: Mapping[str, int]
) -> Iterator[Line]:
    first, rows = parts[0], len(case.items)
    where = {"world": case.world, "backend": case.backend}
    digests = _known({"weights": first.start.get(0, "")})
    common = {"fingerprint": {}, "identity": "case", "digests": digests, **where}
    common |= {"writer": WRITER, "algorithms": _DIGESTS}
    planned = {"rows": rows, "ids": list(range(rows)), "seed": case.seed, "epochs": case.epochs, **plan}
    reached = first.resumed_from
    if reached:
        yield {"kind": "resume", "step": reached, **common}
    else:
        yield {"kind": "start", "run": "case", "plan": planned, **common}
    for told in updates:
        step = told["step"]
        reached = step
        by_rank = {rank: part.of(rank, step) for part in parts for rank in part.ranks}
        ranks = [_rank_part(by_rank[rank]) for rank in sorted(by_rank)]
        known = {name: value for name, value in told.items() if value is not None}
        event = {
            "kind": "step",
            **{name: _real(value) if name in _REALS else value for name, value in known.items()},
            **where,
            "digests": {name: ranks[0][name] for name in _DIGESTS if name in ranks[0]},
            "ranks": ranks,
        }
        if step in first.values:  # rank 0's tensors were recorded; the line refers to them by the update's number
            event["tensors"] = {name: f"{step}/{name}" for name in ("gradients", "weights")}
        yield event
    broken = next((part.violation for part in parts if part.violation), None)
    if broken is not None:
        clause, step, message = broken
        yield {"kind": "violation", "clause": clause, "step": step, "ranks": [], "tensor": "", "seen": message}
    elif case.stop_after is None:
        yield {"kind": "end", "step": reached, "reason": "finished", "digests": {}}


def _rank_part(own: RankUpdate) -> Line:
    digests = {"weights": own.weights, "optimizer": own.optimizer, "gradient": own.gradient}
    return {"rank": own.rank, "leaves": [], "ids": [row for leaf in own.leaves for row in leaf], **_known(digests)}


def _real(value: float) -> Line:
    return {"value": value if math.isfinite(value) else None, "hex": float(value).hex()}


def _known(digests: Mapping[str, str]) -> dict[str, str]:
    return {name: digest for name, digest in digests.items() if digest}
