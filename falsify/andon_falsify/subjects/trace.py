"""What a run leaves for the claims: events observed from outside the trainer, and the trainer's own ledger.

The trainer computes nothing of the first: digests are SHA-256 over the bytes of the tensors, and rows are those that a
rank requested from its task. The events go through the same reader as a ledger.

The witness writes them as lines of the ledger's schema, without what was not observed. It shares no code with the
writer of a trainer's ledger, so that one fault cannot make both report the same. A test has their reader accept every
line of this one.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from andon_falsify.history import History, chain_digest, read_lines
from andon_falsify.history.events import VERSION
from andon_falsify.subjects.case import Case

Tensors = Mapping[str, Tensor]
Placed = tuple[str, tuple[int, ...], str]
"""Name, shape and element type of a tensor."""
WRITER = "witness"
_DIGESTS = dict.fromkeys(("weights", "gradient", "optimizer"), "sha256")
"""Over names, types, shapes and bytes; the trainer computes none of them."""
_REALS = ("lr", "loss", "grad_norm")
_MOST_TRACES = 64

Line = Mapping[str, Any]


def bytes_of(tensor: Tensor) -> bytes:
    """The bytes of a contiguous tensor on the CPU, without numpy, which torch does not require."""
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.nbytes else b""


def digest(tensors: Tensors) -> str:
    """16 hexadecimal digits over names, types, shapes and bytes of `tensors`, sorted by name."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        found.update(f"{name} {value.dtype} {tuple(value.shape)};".encode())
        found.update(bytes_of(value) if value.dim() else repr(value.item()).encode())
    return found.hexdigest()[:16]


def copied(tensors: Tensors) -> dict[str, Tensor]:
    """Detached copies of `tensors` on the CPU, safe to send to the parent process."""
    return {name: value.detach().to("cpu", copy=True) for name, value in tensors.items()}


@dataclass
class RankUpdate:
    """What one rank did in one update. leaves: the rows of each micro-batch that it computed; the rest are digests."""

    rank: int
    step: int
    leaves: list[tuple[int, ...]] = field(default_factory=list)
    weights: str = ""
    optimizer: str = ""
    gradient: str = ""


@dataclass(frozen=True)
class Reported:
    """What the trainer reported of one update. ids: the global batch in plan order."""

    step: int
    epoch: int
    ids: tuple[int, ...]
    count: int
    lr: float
    loss: float
    norm: float


@dataclass(frozen=True)
class Values:
    """Rank 0's tensors of one update: reduced gradient before clipping, and weights after it, by parameter."""

    gradients: Tensors
    weights: Tensors


@dataclass(frozen=True)
class LeafMasks:
    """The dropout masks of one micro-batch by module, and the length to which its rows were padded.

    masks: each element is 0 or 1 / chance to keep. hidden: an operation whose dropout mask cannot be observed, or "".
    """

    length: int
    masks: Tensors
    hidden: str = ""


@dataclass
class Observations:
    """What was observed in one process, which holds `ranks`. Filled during the run and merged into a `Trace`.

    place: see `place_of_bits`, of all ranks of the run. at: the update that is computed now; if updates are judged a
    step later, the one before it is not in `reported` yet. masks: by update and rows. final: digests of weights and
    optimizer. frozen: digests of what must not change, at the start and at the end. resting: live bytes after each
    update. violation: clause, step and message.
    """

    ranks: tuple[int, ...]
    place: str = "cpu"
    at: int = 0
    steps: dict[tuple[int, int], RankUpdate] = field(default_factory=dict)
    reported: list[Reported] = field(default_factory=list)
    values: dict[int, Values] = field(default_factory=dict)
    masks: dict[tuple[int, tuple[int, ...]], LeafMasks] = field(default_factory=dict)
    state: Tensors = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    start: dict[int, str] = field(default_factory=dict)
    final: dict[int, tuple[str, str]] = field(default_factory=dict)
    frozen: dict[int, tuple[str, str]] = field(default_factory=dict)
    layouts: dict[int, tuple[Placed, ...]] = field(default_factory=dict)
    peaks: dict[int, int] = field(default_factory=dict)
    resting: dict[int, list[int]] = field(default_factory=dict)
    planned_bytes: int = 0
    violation: tuple[str, int, str] | None = None
    resumed_from: int = 0
    ledger: bytes = b""

    def of(self, rank: int, step: int) -> RankUpdate:
        """What `rank` did in update `step`; empty on first use."""
        return self.steps.setdefault((rank, step), RankUpdate(rank, step))


@dataclass(frozen=True)
class Trace:
    """A whole run by all ranks. errors: by rank, what ended it other than a violation."""

    case: Case
    parts: tuple[Observations, ...]
    seen: History
    ledger: History | None
    errors: Mapping[int, str] = field(default_factory=dict)

    @property
    def first(self) -> Observations:
        """The observations in the process of rank 0."""
        return self.parts[0]

    @property
    def place(self) -> str:
        """See `place_of_bits`; "" if nothing was observed."""
        return self.first.place if self.parts else ""

    @property
    def violation(self) -> tuple[str, int, str] | None:
        """Clause, step and message, if the trainer's contracts stopped the run."""
        return next((part.violation for part in self.parts if part.violation), None)

    @property
    def failures(self) -> str:
        """The errors in one line, without tracebacks."""
        texts = {rank: text.partition("\nTraceback")[0].strip() for rank, text in sorted(self.errors.items())}
        return "; ".join(f"rank {rank}: {text}" for rank, text in texts.items())

    @property
    def stopped_at(self) -> dict[int, int]:
        """For each rank, its update when the run ended."""
        ends = [max([part.resumed_from, *(told.step for told in part.reported)]) for part in self.parts]
        return {
            rank: part.violation[1] if part.violation else end
            for part, end in zip(self.parts, ends, strict=True)
            for rank in part.ranks
        }

    def gathered(self, name: str) -> dict[Any, Any]:
        """The field `name` of all processes, a mapping, merged."""
        return {key: value for part in self.parts for key, value in getattr(part, name).items()}


def assemble_trace(case: Case, parts: Sequence[Observations], errors: Mapping[int, str], name: str) -> Trace:
    """One trace from the observations of each process, beginning with that of rank 0."""
    seen = read_lines(witnessed(case, parts), f"{name} world {case.world}")
    raw = parts[0].ledger if parts else b""
    ledger = read_lines(raw.splitlines(keepends=True), f"ledger of {name} world {case.world}") if raw else None
    return Trace(case, tuple(parts), seen, ledger, dict(errors))


def witnessed(case: Case, parts: Sequence[Observations]) -> list[bytes]:
    """The lines of the witness, see `lines_of`."""
    plan = {"batch_size": case.batch_size, "micro_batches": case.micro_batches, "steps": case.updates()}
    names = ("step", "ids", "epoch", "count", "lr", "loss")
    reported = [each for part in parts[:1] for each in part.reported]
    updates = [{name: getattr(each, name) for name in names} | {"grad_norm": each.norm} for each in reported]
    return lines_of(case, parts, updates, plan)


def lines_of(
    case: Case, parts: Sequence[Observations], updates: Iterable[Line], plan: Mapping[str, int]
) -> list[bytes]:
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
    common = {
        "fingerprint": {},
        "identity": "case",
        "digests": _known({"weights": first.start.get(0, "")}),
        **where,
        "writer": WRITER,
        "algorithms": _DIGESTS,
    }
    planned = {"rows": rows, "ids": list(range(rows)), "seed": case.seed, "epochs": case.epochs, **plan}
    reached = first.resumed_from
    if reached:
        yield {"kind": "resume", "step": reached, **common}
    else:
        yield {"kind": "start", "run": "case", "plan": planned, **common}
    for told in updates:
        reached = step = told["step"]
        by_rank = {rank: part.of(rank, step) for part in parts for rank in part.ranks}
        ranks = []
        for rank, own in sorted(by_rank.items()):
            digests = {"weights": own.weights, "optimizer": own.optimizer, "gradient": own.gradient}
            used = [row for leaf in own.leaves for row in leaf]
            ranks.append({"rank": rank, "leaves": [], "ids": used, **_known(digests)})
        known = {name: value for name, value in told.items() if value is not None}
        yield {
            "kind": "step",
            **{name: _real(value) if name in _REALS else value for name, value in known.items()},
            **where,
            "digests": {name: ranks[0][name] for name in _DIGESTS if name in ranks[0]},
            "ranks": ranks,
        }
    broken = next((part.violation for part in parts if part.violation), None)
    if broken is not None:
        clause, step, message = broken
        yield {"kind": "violation", "clause": clause, "step": step, "ranks": [], "tensor": "", "seen": message}
    elif case.stop_after is None:
        yield {"kind": "end", "step": reached, "reason": "finished", "digests": {}}


def _real(value: float) -> Line:
    return {"value": value if math.isfinite(value) else None, "hex": float(value).hex()}


def _known(digests: Mapping[str, str]) -> dict[str, str]:
    return {name: digest for name, digest in digests.items() if digest}


class CutOff(BaseException):
    """Ends the run as a kill would: without a checkpoint or a last line."""


class Subject(Protocol):
    """A trainer that runs cases and can be watched."""

    name: str

    def run(self, case: Case) -> Trace:
        """Run `case` to its end, a violation or its `stop_after`. Errors are in the trace, not raised."""


class Remembering:
    """The last traces of a subject by case, but not those of runs that keep files. runs: how many were made."""

    def __init__(self, subject: Subject) -> None:
        self.name = subject.name
        self._subject = subject
        self._held: dict[Case, Trace] = {}
        self.runs = 0

    def run(self, case: Case) -> Trace:
        if case in self._held:
            return self._held[case]
        self.runs += 1
        trace = self._subject.run(case)
        if case.folder is None:
            self._held[case] = trace
            if len(self._held) > _MOST_TRACES:
                del self._held[next(iter(self._held))]
        return trace
