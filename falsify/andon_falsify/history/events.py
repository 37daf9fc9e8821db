"""The events of a history: the lines of a ledger as plain values, and `parse_line`, which makes an event of a line."""

from __future__ import annotations

import marshal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Generic, NamedTuple, TypeVar

from andon_falsify.history import fields as read
from andon_falsify.history.fields import Fields, LineError, Number, RowId, whole

VERSION = 4
"""The only version of a line that is read."""
KINDS = frozenset({"start", "step", "eval", "checkpoint", "resume", "violation", "retraction", "end"})
_WITNESS = "witness"
"""The writer of the histories that this package records itself."""


@dataclass(frozen=True, slots=True)
class Event:
    """One line. `line` counts from 1; `seq` and `prev` are the writer's; `digest` is computed from the line's bytes."""

    line: int
    kind: str
    seq: int | None
    prev: str | None
    digest: str
    fields: Fields = field(default_factory=dict)

    @property
    def step(self) -> int | None:
        """The number of the update that the line is about, if it gives one."""
        return whole(self.fields.get("step"))


class Plan(NamedTuple):
    """The plan of the start line; None for what the line leaves out. `ids` are the rows that an epoch visits."""

    rows: int | None = None
    ids: tuple[RowId, ...] | None = None
    batch_size: int | None = None
    micro_batches: int | None = None
    seed: int | None = None
    epochs: int | None = None
    steps: int | None = None


_NO_PLAN = Plan()


@dataclass(frozen=True, slots=True)
class StartEvent(Event):
    """The first line of a run that began anew."""

    plan: Plan = _NO_PLAN
    initial_weights: str | None = None

    @property
    def fingerprint(self) -> object:
        """Device model and library versions, on which bits may depend. None for the witness, who records none."""
        # Its field is empty: compared with a fingerprint, it would make every run one of another machine.
        return None if self.fields.get("writer") == _WITNESS else self.fields.get("fingerprint")

    @property
    def watched(self) -> bool:
        """Whether a watch wrote the ledger, beside a loop that promises nothing, and not the trainer itself."""
        return self.fields.get("writer") not in (None, _WITNESS)


class RankStep(NamedTuple):
    """One rank in one update; a digest that was not recorded is None.

    `gradient` is the digest of the reduced gradient before clipping, as this rank holds it.
    """

    rank: int
    leaves: tuple[int, ...] = ()
    ids: tuple[RowId, ...] = ()
    weights: str | None = None
    optimizer: str | None = None
    gradient: str | None = None


def _ranks(fields: Fields, name: str) -> tuple[RankStep, ...]:
    return tuple(map(_rank, read.array(fields, name)))


def _rank(entry: object) -> RankStep:
    if not isinstance(entry, dict):
        raise LineError(f"ranks holds {read.quote(entry)}, not an object")
    rank = whole(entry.get("rank"))
    if rank is None:
        raise LineError(f"an entry of ranks has rank {read.quote(entry.get('rank'))}")
    leaves = read.array(entry, "leaves")
    if None in map(whole, leaves):
        raise LineError(f"leaves holds {read.quote(next(leaf for leaf in leaves if whole(leaf) is None))}")
    weights, optimizer, gradient = (read.text(entry, name) for name in ("weights", "optimizer", "gradient"))
    return RankStep(rank, tuple(leaves), read.row_ids(entry, "ids"), weights, optimizer, gradient)


Value = TypeVar("Value")
_READERS: dict[str, Callable[[Fields, str], Any]] = {}
"""How each packed field of a step line is read; of several wrong fields the first in this order is reported."""


class _Packed(Generic[Value]):
    """A field of `StepEvent` that is unpacked when it is accessed."""

    def __init__(self, reader: Callable[[Fields, str], Value]) -> None:
        self._reader = reader

    def __set_name__(self, owner: type, name: str) -> None:
        _READERS.setdefault(name, self._reader)
        self._name = name

    def __get__(self, event: StepEvent, owner: type) -> Value:
        found: Value = _unpacked(event.packed)[self._name]
        return found


@dataclass(frozen=True, slots=True)
class StepEvent(Event):
    """One update. `ids` is the global batch in plan order, `count` its rows; `number` is the update, from 1.

    `weights_norm` is the 2-norm of the trained weights after it. `gradient_at` is "optimizer" if the gradient's digest
    and norm are of the gradient that the optimizer received, clipped or not; else they are of the gradient before
    clipping. `skipped`: a loss scaler skipped the update. `draws`: the modules that draw random numbers in its forward
    passes, as far as they are known. `terms`: the terms that the loss is the mean of; None: the rows.

    A history holds hundreds of thousands of updates, so all but `number` and `epoch` is in `packed` (see `_pack`): ten
    times smaller than the objects. `fields` is empty.
    """

    number: int = 0
    epoch: int | None = None
    packed: bytes = b""

    position = _Packed(read.integer)
    ids = _Packed(read.row_ids)
    count = _Packed(read.integer)
    correct = _Packed(read.integer)
    terms = _Packed(read.integer)
    lr = _Packed(read.real)
    loss = _Packed(read.real)
    grad_norm = _Packed(read.real)
    weights_norm = _Packed(read.real)
    gradient_at = _Packed(read.text)
    skipped = _Packed(read.flag)
    draws = _Packed(read.text)
    world = _Packed(read.integer)
    backend = _Packed(read.text)
    digests = _Packed(read.texts)
    ranks = _Packed(_ranks)

    @property
    def step(self) -> int:
        return self.number

    @property
    def finite(self) -> bool:
        """Whether the recorded loss and gradient norm of this update are finite."""
        return all(number.finite for number in (self.loss, self.grad_norm) if number is not None)


def _pack(fields: Fields) -> bytes:
    """The fields of a `StepEvent`. Ids of ranks that together are the batch, in its order, are packed once."""
    found = {name: reader(fields, name) for name, reader in _READERS.items()}
    ids, ranks = found["ids"], found.pop("ranks")
    split = [row for part in ranks for row in part.ids] == [*ids]
    parts = [(*part[:2], len(part.ids) if split else part.ids, *part[3:]) for part in ranks]
    values = [tuple(value) if isinstance(value, Number) else value for value in found.values()]
    packed: Any = (values, parts)
    return marshal.dumps(packed)


@lru_cache(8)  # a check reads several fields of an update in a row
def _unpacked(packed: bytes) -> Mapping[str, Any]:
    values, parts = marshal.loads(packed)
    fields = dict(zip(_READERS, values, strict=False))
    for name, reader in _READERS.items():
        if reader is read.real and fields[name] is not None:
            fields[name] = Number(*fields[name])
    ranks, at = [], 0
    for rank, leaves, ids, *digests in parts:
        if isinstance(ids, int):
            at, ids = at + ids, fields["ids"][at : at + ids]
        ranks.append(RankStep(rank, leaves, ids, *digests))
    return fields | {"ranks": tuple(ranks)}


@dataclass(frozen=True)
class Unread:
    """A line that is not an event, with the reason. `torn` is a last line without its newline: a write cut short."""

    line: int
    why: str
    excerpt: str
    digest: str
    torn: bool = False


_NO_FIELDS: Fields = {}


def parse_line(line_text: str, line: int, digest: str, before: str = "") -> Event:
    """The event of `line_text` (a line without its newline). digest, before: of this line and of the previous one.

    Raises `LineError` for text that is no JSON object, another version, an unknown kind, or a field of a wrong type.
    """
    fields = read.json_object(line_text)
    if whole(fields.get("v")) != VERSION:
        raise LineError(f"version {read.quote(fields.get('v'))} is not {VERSION}")
    kind = fields.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise LineError(f"kind {read.quote(kind)} is none of {', '.join(sorted(KINDS))}")
    prev = read.text(fields, "prev")
    # One object for both digests, since a history has hundreds of thousands of lines.
    head = (line, kind, whole(fields.get("seq")), before if prev == before else prev, digest)
    if kind == "step":
        update = whole(fields.get("step"))
        if update is None or update < 1:
            raise LineError(f"a step line whose step is {read.quote(fields.get('step'))}, not a number from 1")
        return StepEvent(*head, _NO_FIELDS, number=update, epoch=read.integer(fields, "epoch"), packed=_pack(fields))
    if kind == "retraction":
        kept, last = whole(fields.get("step")), whole(fields.get("last"))
        if kept is None or last is None or not 0 <= kept < last:
            raise LineError(f"a retraction from {read.quote(kept)} to {read.quote(last)}")
    if kind == "start":
        planned = read.mapping(fields, "plan")
        ids = read.row_ids(planned, "ids") if planned.get("ids") is not None else None
        numbers = {name: read.integer(planned, name) for name in Plan._fields if name != "ids"}
        initial = read.text(read.mapping(fields, "initial") or read.mapping(fields, "digests"), "weights")
        return StartEvent(*head, fields, plan=Plan(ids=ids, **numbers), initial_weights=initial)
    return Event(*head, fields)
