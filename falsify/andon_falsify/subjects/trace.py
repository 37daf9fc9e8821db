"""What a run leaves for the checkers: events seen from outside the trainer, and the trainer's own ledger.

Nothing here is computed by the accused: digests are SHA-256 over the bytes of the tensors themselves, rows are those
that a rank asked its task for. The events go through the same reader as a ledger.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from andon_falsify.history import History, read_lines
from andon_falsify.subjects import witness
from andon_falsify.subjects.case import Case

Tensors = Mapping[str, Tensor]
Placed = tuple[str, tuple[int, ...], str]
"""Name, shape and element type of a tensor."""
LeafKey = tuple[int, tuple[int, ...]]
"""Update and rows: what names a micro-batch whoever computed it."""


def digest(tensors: Tensors) -> str:
    """16 hexadecimal digits over names, types, shapes and bytes of `tensors`, in order of their names."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        found.update(f"{name} {value.dtype} {tuple(value.shape)};".encode())
        found.update(value.view(torch.uint8).numpy().tobytes() if value.dim() else repr(value.item()).encode())
    return found.hexdigest()[:16]


def copied(tensors: Tensors) -> dict[str, Tensor]:
    """Copies of `tensors` on the CPU that nothing else changes, without a graph: they travel to the suite."""
    return {name: value.detach().to("cpu", copy=True) for name, value in tensors.items()}


@dataclass
class Sight:
    """What one rank did in one update, seen from outside; `leaves` are the rows of each micro-batch it computed."""

    rank: int
    step: int
    leaves: list[tuple[int, ...]] = field(default_factory=list)
    weights: str = ""
    optimizer: str = ""
    gradient: str = ""


@dataclass(frozen=True)
class Reported:
    """What the trainer said of one update. `ids` are the global batch in plan order."""

    step: int
    epoch: int
    position: int
    ids: tuple[int, ...]
    count: int
    correct: int
    lr: float
    loss: float
    norm: float


@dataclass(frozen=True)
class Values:
    """Rank 0's tensors of one update by parameter: reduced gradient before clipping, weights after the update."""

    gradients: Tensors
    weights: Tensors


@dataclass(frozen=True)
class LeafMasks:
    """The dropout of one micro-batch: its padded length, and the factors by place.

    hidden: the operation that dropped something and does not tell what, "" where there was none.
    """

    length: int
    masks: Tensors
    hidden: str = ""


@dataclass
class Sightings:
    """What was seen in one process, which holds `ranks`. Mutable while the run goes on; merged into a `Trace`.

    at: the update that is being computed. Where updates are judged a step later, the one before it is not in
    `reported` yet. place: see `place_of_bits`, of all ranks of the run.
    """

    ranks: tuple[int, ...]
    place: str = "cpu"
    at: int = 0
    steps: dict[tuple[int, int], Sight] = field(default_factory=dict)
    reported: list[Reported] = field(default_factory=list)
    values: dict[int, Values] = field(default_factory=dict)
    masks: dict[LeafKey, LeafMasks] = field(default_factory=dict)
    state: Tensors = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    start: dict[int, str] = field(default_factory=dict)
    final: dict[int, tuple[str, str]] = field(default_factory=dict)
    frozen: dict[int, tuple[str, str]] = field(default_factory=dict)
    """Digests of what must not change, at the start and at the end."""
    layouts: dict[int, tuple[Placed, ...]] = field(default_factory=dict)
    peaks: dict[int, int] = field(default_factory=dict)
    resting: dict[int, list[int]] = field(default_factory=dict)
    planned_bytes: int = 0
    violation: tuple[str, int, str] | None = None
    """Clause, step, message."""
    resumed_from: int = 0
    ledger: bytes = b""

    def of(self, rank: int, step: int) -> Sight:
        """The sight of `rank` at `step`, made on first use."""
        return self.steps.setdefault((rank, step), Sight(rank, step))


@dataclass(frozen=True)
class Trace:
    """A whole run by all ranks. `errors` are the texts of ranks that ended otherwise than by a violation."""

    case: Case
    parts: tuple[Sightings, ...]
    seen: History
    ledger: History | None
    errors: Mapping[int, str] = field(default_factory=dict)

    @property
    def first(self) -> Sightings:
        """What the process of rank 0 saw."""
        return self.parts[0]

    @property
    def place(self) -> str:
        """Which kind of device the ranks were on, or each of them; "" of a run of which nothing was seen."""
        return self.parts[0].place if self.parts else ""

    @property
    def violation(self) -> tuple[str, int, str] | None:
        """Clause, step and message, if the trainer's own contracts stopped the run."""
        return next((part.violation for part in self.parts if part.violation), None)

    @property
    def failures(self) -> str:
        """What ranks ended with otherwise, each without its traceback; "" where none did."""
        told = ((rank, text.partition("\nTraceback")[0].strip()) for rank, text in sorted(self.errors.items()))
        return "; ".join(f"rank {rank}: {text}" for rank, text in told)

    @property
    def stopped_at(self) -> dict[int, int]:
        """For each rank, the update at which it was when the run ended."""
        found = {}
        for part in self.parts:
            done = max((reported.step for reported in part.reported), default=part.resumed_from)
            for rank in part.ranks:
                found[rank] = part.violation[1] if part.violation else done
        return found

    def gathered(self, name: str) -> dict[Any, Any]:
        """The mapping `name` of all processes in one."""
        return {key: value for part in self.parts for key, value in getattr(part, name).items()}

    def signature(self) -> str:
        """A digest of everything that a fault could have changed."""
        parts = [
            (
                sorted((key, vars(sight)) for key, sight in part.steps.items()),
                [tuple(map(repr, vars(reported).values())) for reported in part.reported],
                {step: (digest(v.gradients), digest(v.weights)) for step, v in part.values.items()},
                sorted((key, digest(leaf.masks)) for key, leaf in part.masks.items()),
                part.start,
                part.final,
                part.frozen,
                part.layouts,
                part.peaks,
                part.violation,
            )
            for part in self.parts
        ]
        lines = [(line.line, line.digest) for line in self.ledger.lines()] if self.ledger else []
        return hashlib.sha256(pickle.dumps((parts, lines, sorted(self.errors.items())))).hexdigest()


def assemble_trace(case: Case, parts: Sequence[Sightings], errors: Mapping[int, str], name: str) -> Trace:
    """One trace from what each process saw. `parts` begins with that of rank 0."""
    seen = read_lines(witness.linked(_events(case, parts)), f"{name} world {case.world}")
    raw = parts[0].ledger if parts else b""
    ledger = read_lines(raw.splitlines(keepends=True), f"ledger of {name} world {case.world}") if raw else None
    return Trace(case, tuple(parts), seen, ledger, dict(errors))


def _events(case: Case, parts: Sequence[Sightings]) -> Iterator[witness.Line]:
    if not parts:
        return
    first = parts[0]
    plan = {"batch_size": case.batch_size, "micro_batches": case.micro_batches, "steps": case.updates()}
    yield witness.opening(case, plan, first.start.get(0, ""), first.resumed_from)
    for told in first.reported:
        yield witness.update(
            case,
            told.step,
            told.ids,
            rank_parts(parts, told.step),
            reals={"lr": told.lr, "loss": told.loss, "grad_norm": told.norm},
            kept=told.step in first.values,
            epoch=told.epoch,
            position=told.position,
            count=told.count,
            correct=told.correct,
        )
    broken = next((part.violation for part in parts if part.violation), None)
    yield from witness.ending(case, broken, max((told.step for told in first.reported), default=first.resumed_from))


def rank_parts(parts: Sequence[Sightings], step: int) -> list[witness.Line]:
    """What each rank did in the update `step`, in order of rank."""
    sights = sorted((part.of(rank, step) for part in parts for rank in part.ranks), key=lambda sight: sight.rank)
    return [
        witness.rank_part(
            sight.rank,
            sight.leaves,
            {"weights": sight.weights, "optimizer": sight.optimizer, "gradient": sight.gradient},
        )
        for sight in sights
    ]


class CutOff(BaseException):
    """The run ends here as by a kill: no checkpoint, no last line."""


class Subject(Protocol):
    """A trainer that can run a case and be watched while it does."""

    name: str

    def run(self, case: Case) -> Trace:
        """Run `case` to its end, a violation, or the point where it is cut off. Errors are in the trace, not raised."""
        ...


class Remembering:
    """A subject that does not run a case again that it has run: results are a function of the case.

    Runs that keep files are not remembered. At most `most` traces are held, the oldest goes first.
    """

    def __init__(self, subject: Subject, most: int = 64) -> None:
        self.name = subject.name
        self._subject = subject
        self._most = most
        self._held: dict[Case, Trace] = {}
        self.runs = 0

    def run(self, case: Case) -> Trace:
        """See `Subject.run`."""
        if case.folder is not None:
            self.runs += 1
            return self._subject.run(case)
        if case not in self._held:
            self.runs += 1
            self._held[case] = self._subject.run(case)
            if len(self._held) > self._most:
                del self._held[next(iter(self._held))]
        return self._held[case]
