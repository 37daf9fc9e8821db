"""One ledger line: the dataclasses of its kinds, its bytes, and the chain that links lines.

A line is one JSON object with sorted keys and no spaces, ended by a line feed:
`{"kind":K,"prev":H,"seq":n,"v":4,...}`. `seq` counts from 0. `prev` is the first 16 hexadecimal digits of SHA-256 of
the line before, without its line feed, and zeros in the first line. The chain is evidence of corruption, not of
tampering: an attacker can rewrite all lines after a changed one.

A reader refuses an unknown version or field, so a new field needs a new version. A line leaves out fields that are
None: a watch of a foreign loop and the falsifier's witness know less about a step than our own trainer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, get_args

from andon_contracts.fields import Count, Hex16, Part, Real, json_object, read_field

SCHEMA_VERSION = 4
"""The version of every line; readers refuse any other."""
GENESIS = "0" * 16
"""`prev` of the first line."""
MAX_LINE = 1 << 24
"""The longest line, in bytes, that is written or read."""
_TENSORS = ("weights", "gradient", "optimizer", "base")
TRAINER_DIGESTS: Mapping[str, str] = {
    **dict.fromkeys(_TENSORS, "tensor-digest"), "content": "content-sums", "data": "sha256",
}  # fmt: skip
"""The algorithm of each digest that our own trainer writes."""
WATCH_DIGESTS: Mapping[str, str] = {**dict.fromkeys(_TENSORS, "flat-digest"), "content": "text-digest"}
"""The algorithm of each digest that a watch writes: it digests the tensors of a group in one pass."""
_ENVELOPE = frozenset({"v", "kind", "seq", "prev"})


@dataclass(frozen=True)
class Plan(Part):
    """The plan of a run. `ids`: the rows of an epoch, if they are named one by one. `task`: None is classification."""

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
    """Digests of one step: planned content, reduced gradient before clipping, state after the update."""

    content: Hex16 | None
    gradient: Hex16 | None
    weights: Hex16 | None
    optimizer: Hex16 | None


@dataclass(frozen=True)
class RankPart(Part):
    """One rank in a step: its micro-batches (`leaves`) and rows, and the digests of its state after the update.

    A rank has no digest of a shard, because no other rank should have the same.
    """

    rank: Count
    leaves: tuple[Count, ...]
    ids: tuple[Count, ...]
    weights: Hex16 | None
    gradient: Hex16 | None = None
    optimizer: Hex16 | None = None
    content: Hex16 | None = None


@dataclass(frozen=True)
class Start(Part):
    """The first line of a run. `writer`: None is our trainer. `algorithms`: the algorithm of each digest, by field."""

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

    `loss` is the mean over `terms` terms (None: one for each of the `count` rows), `grad_norm` the norm before
    clipping, `correct` the number of terms that were predicted right.
    From a watch: `weights_norm` is the 2-norm of the trained parameters after the update. `gradient_at` is "optimizer"
    if digest and norm are of the optimizer's input, because nobody reported the reduced gradient before clipping.
    `optimizer_index` counts from 0 if several optimizers are watched; the weights are then its own. `skipped`: the loss
    scaler skipped the update. `draws`: what draws random numbers in the forward passes (first updates only).
    From the falsifier's witness: `tensors` names the tensors of this update that are stored elsewhere.
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
    """Scores after `step` updates on `rows` rows.

    `confusion` is the digest of the file with the confusion matrix, if there is one: it may be longer than a line.
    """

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
    """The run goes on after `step` updates, from the checkpoint `name` (None: from the start).

    `torn` is the number of bytes of an unfinished last line that were cut off the ledger.
    """

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
    """A violation: the clause and its finding.

    `action` is what a watch did: "raised", "warned", "called" (a function of the user), "suspected" (a warning about
    something that a right loop may do too); None: the run ended. `applied`: it was found after the update was made.
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


@dataclass(frozen=True)
class Retraction(Part):
    """The updates after `step`, up to `last`, no longer count, because any of them may have caused a later violation.

    `step` is the last checkpoint, from which a resumed run goes on; its updates are not compared with these. `clause`
    and `seen` are those of the violation.
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


class Line(NamedTuple):
    """A record with its place in the chain."""

    seq: int
    prev: str
    record: Record


class LineTooLong(ValueError):
    """A record takes more than `MAX_LINE` bytes, such as a step with a million rows."""


def encode(record: Record, seq: int, prev: str) -> bytes:
    """The line of `record`, line feed included.

    Raises `ValueError` for a record that readers would refuse, `LineTooLong` for a line of more than `MAX_LINE` bytes.
    """
    body = record.to_json()
    # Read it back before it is written: a line that readers refuse would lose every line after it.
    if type(record).from_json(body) != record:
        raise ValueError(f"a {record.kind} record does not survive JSON: a field has a value of a wrong type")
    envelope = {"v": SCHEMA_VERSION, "kind": record.kind, "seq": read_field(Count, seq, "seq"), "prev": prev}
    read_field(Hex16, prev, "prev")
    text = json.dumps(body | envelope, sort_keys=True, separators=(",", ":"), allow_nan=False)
    line = text.encode("ascii") + b"\n"
    if len(line) > MAX_LINE:
        raise LineTooLong(f"a {record.kind} record takes {len(line)} bytes, more than {MAX_LINE}")
    return line


def decode_line(line: bytes) -> Line:
    """The record of `line` and its place. Raises `ValueError` for a line that `encode` does not write."""
    if len(line) > MAX_LINE:
        raise ValueError(f"the line has {len(line)} bytes, more than {MAX_LINE}")
    try:
        data = _DECODER.decode(line.decode("ascii"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not a line of JSON: {error}") from None
    found = json_object(data, "the line")
    version, kind = found.get("v"), found.get("kind")
    if type(version) is not int or version != SCHEMA_VERSION:
        raise ValueError(f"version {version!r} is not {SCHEMA_VERSION}")
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"unknown kind {kind!r}")
    body = {name: value for name, value in found.items() if name not in _ENVELOPE}
    seq, prev = read_field(Count, found.get("seq"), "seq"), read_field(Hex16, found.get("prev"), "prev")
    return Line(seq, prev, KINDS[kind].from_json(body))


def chain(previous_line: bytes) -> str:
    """`prev` of the line after `previous_line`, whose line feed does not count."""
    return hashlib.sha256(previous_line.removesuffix(b"\n")).hexdigest()[:16]


def check_link(line: Line, count: int, head: str) -> None:
    """Check that `line` follows `count` lines whose head digest is `head`. Raises `ValueError`."""
    if line.seq != count:
        raise ValueError(f"sequence number {line.seq} where {count} belongs")
    if line.prev != head:
        raise ValueError(f"it follows a line with digest {line.prev}, the line before it has {head}")


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return found


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


# Python's decoder takes more than JSON: NaN, and the last of two equal keys, where other decoders take the first.
_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant)
