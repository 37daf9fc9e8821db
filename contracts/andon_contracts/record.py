"""One ledger line: the dataclasses of its kinds, its bytes, and the hash chain of lines.

A line is one JSON object with sorted keys and no spaces, ended by a line feed: `{"kind":K,"prev":H,"seq":n,"v":4,...}`.
`seq` counts from 0. `prev` is the first 16 hexadecimal digits of SHA-256 of the previous line without its line feed,
and zeros in the first line. The chain detects corruption, not tampering: an attacker can rewrite all later lines too.

A reader refuses an unknown version or field, so a new field needs a new version. A line omits fields whose value is
None: a watch and the falsifier's witness know less about a step than our own trainer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Self, get_args

from andon_contracts.fields import Count, Hex16, Part, Real, json_object, read_field
from andon_contracts.violation import Finding

SCHEMA_VERSION = 4
GENESIS = "0" * 16
"""`prev` of the first line."""
MAX_LINE = 1 << 24
"""The longest line, in bytes, that is written or read."""


@dataclass(frozen=True)
class Plan(Part):
    """`ids`: the rows of an epoch, if they are listed. `task`: None is classification."""

    rows: Count | None
    batch_size: Count | None
    micro_batches: Count | None
    seed: Count | None
    epochs: Count | None
    steps: Count | None
    ids: tuple[Count, ...] | None = None
    task: str | None = None


@dataclass(frozen=True)
class StepDigests(Part):
    """Of the planned content, the reduced gradient before clipping, and the state after the update."""

    content: Hex16 | None
    gradient: Hex16 | None
    weights: Hex16 | None
    optimizer: Hex16 | None


@dataclass(frozen=True)
class RankPart(Part):
    """One rank in a step: its micro-batches (`leaves`), its rows, and digests of its state, except of shards."""

    rank: Count
    leaves: tuple[Count, ...]
    ids: tuple[Count, ...]
    weights: Hex16 | None
    gradient: Hex16 | None = None
    optimizer: Hex16 | None = None
    content: Hex16 | None = None


@dataclass(frozen=True)
class Start(Part):
    """The first line of a run. `writer`: None is our trainer. `algorithms`: of digests, by the name of the digest."""

    kind: ClassVar[str] = "start"
    run: str
    fingerprint: Mapping[str, str]
    identity: str
    plan: Plan
    digests: Mapping[str, Hex16]
    world: Count
    backend: str
    writer: str | None = None
    algorithms: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Step(Part):
    """One update. `step` is its number from 1, `position` that of its first row in the epoch, `ids` its rows in order.

    `loss` is the mean over `terms` terms (None: one per row of `count`), `grad_norm` the norm before clipping,
    `correct` the number of terms predicted right. A watch adds `weights_norm`, the 2-norm of the trained parameters
    after the update; `gradient_at`, "optimizer" if digest and norm are of the optimizer's input because the reduced
    gradient was not reported; `optimizer_index` from 0 if it watches several (the weights are then of this one);
    `skipped`, if the loss scaler skipped the update; and `draws`, the modules that draw random numbers (first updates
    only). The falsifier's witness adds `tensors`, the names of tensors that are stored elsewhere.
    """

    kind: ClassVar[str] = "step"
    step: Count
    epoch: Count | None
    position: Count | None
    ids: tuple[Count, ...]
    count: Count | None
    lr: Real
    loss: Real | None
    grad_norm: Real | None
    correct: Count | None
    world: Count
    backend: str
    digests: StepDigests
    ranks: tuple[RankPart, ...]
    weights_norm: Real | None = None
    gradient_at: str | None = None
    optimizer_index: Count | None = None
    skipped: bool | None = None
    tensors: Mapping[str, str] | None = None
    terms: Count | None = None
    draws: str | None = None


@dataclass(frozen=True)
class Evaluation(Part):
    """Scores after `step` updates on `rows` rows. `confusion`: the digest of the file with the confusion matrix."""

    kind: ClassVar[str] = "eval"
    step: Count
    epoch: Count | None
    rows: Count
    scores: Mapping[str, Real]
    confusion: Hex16 | None = None


@dataclass(frozen=True)
class Saved(Part):
    """A complete checkpoint: the name of its folder and the digest of its tensors."""

    kind: ClassVar[str] = "checkpoint"
    step: Count
    name: str
    digest: Hex16
    best: bool = False


@dataclass(frozen=True)
class Resume(Part):
    """The run continues after `step` updates from checkpoint `name` (None: the start); `torn` bytes were cut off."""

    kind: ClassVar[str] = "resume"
    step: Count
    identity: str
    fingerprint: Mapping[str, str]
    digests: Mapping[str, Hex16]
    world: Count
    backend: str
    name: str | None = None
    torn: Count = 0
    writer: str | None = None
    algorithms: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Broken(Part):
    """A violation: the clause and its finding. `applied`: it was found after the update was made.

    `action` of a watch: "raised", "warned", "called" (a function of the user), "suspected" (a warning about something
    that a correct loop may do too). None: the run ended.
    """

    kind: ClassVar[str] = "violation"
    clause: str
    step: Count
    ranks: tuple[Count, ...]
    tensor: str
    seen: str
    details: Mapping[str, str] = field(default_factory=dict)
    action: str | None = None
    applied: bool | None = None

    @classmethod
    def of(cls, clause: str, found: Finding, action: str | None = None, applied: bool | None = None) -> Self:
        return cls(clause, found.step, found.ranks, found.tensor, found.seen, dict(found.details), action, applied)


@dataclass(frozen=True)
class Retraction(Part):
    """The updates after the checkpoint of `step`, up to `last`, no longer count: any may have caused the violation.

    A resumed run starts at `step`; its updates are not compared with these.
    """

    kind: ClassVar[str] = "retraction"
    step: Count
    last: Count
    clause: str
    seen: str


@dataclass(frozen=True)
class End(Part):
    """The run ended after `step` updates, for `reason`: finished, early-stopping, preempted, violation, failed."""

    kind: ClassVar[str] = "end"
    step: Count
    reason: str
    digests: Mapping[str, Hex16]
    final_loss: Real | None = None
    violations: Count = 0


Record = Start | Step | Evaluation | Saved | Resume | Broken | Retraction | End
KINDS: Mapping[str, type[Record]] = {record.kind: record for record in get_args(Record)}


class LineTooLong(ValueError):
    """A record takes more than `MAX_LINE` bytes."""


def encode(record: Record, seq: int, prev: str) -> bytes:
    """The line of `record`, line feed included.

    Raises `ValueError` for a record that readers would refuse, and `LineTooLong`.
    """
    body = record.to_json()
    # A line that readers refuse would lose every line after it.
    if type(record).from_json(body) != record:
        raise ValueError(f"a {record.kind} record does not survive JSON: a field has a value of a wrong type")
    envelope = {"v": SCHEMA_VERSION, "kind": record.kind, "seq": read_field(Count, seq, "seq"), "prev": prev}
    read_field(Hex16, prev, "prev")
    text = json.dumps(body | envelope, sort_keys=True, separators=(",", ":"), allow_nan=False)
    line = text.encode("ascii") + b"\n"
    if len(line) > MAX_LINE:
        raise LineTooLong(f"a {record.kind} record takes {len(line)} bytes, more than {MAX_LINE}")
    return line


def decode_line(line: bytes, count: int, head: str) -> Record:
    """The record of `line` after `count` lines, the last with digest `head`. Raises `ValueError` for another line."""
    if len(line) > MAX_LINE:
        raise ValueError(f"the line has {len(line)} bytes, more than {MAX_LINE}")
    try:
        data = _DECODER.decode(line.decode("ascii"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not a line of JSON: {error}") from None
    version, kind = json_object(data, "the line").get("v"), data.get("kind")
    if type(version) is not int or version != SCHEMA_VERSION:
        raise ValueError(f"version {version!r} is not {SCHEMA_VERSION}")
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"unknown kind {kind!r}")
    seq, prev = read_field(Count, data.get("seq"), "seq"), read_field(Hex16, data.get("prev"), "prev")
    record = KINDS[kind].from_json({key: data[key] for key in data if key not in {"v", "kind", "seq", "prev"}})
    if seq != count:
        raise ValueError(f"sequence number {seq} where {count} belongs")
    if prev != head:
        raise ValueError(f"it follows a line with digest {prev}, the line before it has {head}")
    return record


def chain(previous_line: bytes) -> str:
    """`prev` of the line after `previous_line`, which may have its line feed."""
    return hashlib.sha256(previous_line.removesuffix(b"\n")).hexdigest()[:16]


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    data = dict(pairs)
    if len(data) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return data


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


# Python's decoder accepts more than JSON: NaN, and duplicate keys, of which other decoders may use the first.
_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant)
