"""The events of a history: the lines of a ledger as plain values, `parse_line`, and `RowSet`.

This reader follows the published form of the ledger and shares no code with the writer, so a mistake of the writer is
not read back by the same mistake. An absent field is empty, and a wrong one is a `LineError` with the reason.
"""

from __future__ import annotations

import json
import marshal
import math
import reprlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import compress
from typing import Any, Generic, NamedTuple, TypeVar

VERSION = 5
"""The only version of a line that is read."""
KINDS = frozenset({"start", "step", "eval", "checkpoint", "resume", "violation", "retraction", "end"})
_WITNESS = "witness"
"""The writer of the histories that this package records itself."""
RowId = int | str
"""The id of a row of the dataset: its index, or the key that its owner gave it."""
Fields = Mapping[str, object]
_Kind = TypeVar("_Kind")
_WORDS: Mapping[type, str] = {str: "text", list: "a list", dict: "an object"}
_quote = reprlib.repr  # of bounded length: a line may be megabytes long


class LineError(ValueError):
    """Why a line is not an event of the schema."""


class Number(NamedTuple):
    """A measured float. `value` is None if it was not finite (JSON has no NaN); `hex` is its exact form."""

    value: float | None
    hex: str

    @property
    def finite(self) -> bool:
        return self.value is not None and math.isfinite(self.value)

    def __str__(self) -> str:
        return self.hex if self.value is None else f"{self.value:.9g}"


def _without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Rejects a duplicate name: readers of JSON disagree on which of the two values counts."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in found if names.count(name) > 1)
        raise ValueError(f"{_quote(twice)} stands twice in one object")
    return found


def _whole(value: object) -> int | None:
    """`value` if it is a JSON integer of 64 bits, else None (true and false are not numbers here)."""
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63 else None


def _integer(fields: Fields, name: str) -> int | None:
    value = fields.get(name)
    number = _whole(value)
    if number is None and value is not None:
        raise LineError(f"{name} is {_quote(value)}, not an integer")
    return number


def _held(fields: Fields, name: str, kind: type[_Kind]) -> _Kind:
    value = fields.get(name)
    if value is None or isinstance(value, kind):
        return kind() if value is None else value
    raise LineError(f"{name} is {_quote(value)}, not {_WORDS[kind]}")


def _text(fields: Fields, name: str) -> str | None:
    return _held(fields, name, str) or None


def _texts(fields: Fields, name: str) -> Mapping[str, str]:
    held = _held(fields, name, dict)
    return {key: found for key in held if (found := _text(held, key)) is not None}


def _row_ids(fields: Fields, name: str) -> tuple[RowId, ...]:
    entries = _held(fields, name, list)
    # Row ids are most of a ledger: if all are integers, the least and the greatest decide for all of them.
    if {*map(type, entries)} == {int} and None not in (_whole(min(entries)), _whole(max(entries))):
        return tuple(entries)
    for entry in entries:
        if not isinstance(entry, str) and _whole(entry) is None:
            raise LineError(f"{name} holds {_quote(entry)}, not a row id")
    return tuple(entries)


def _real(fields: Fields, name: str) -> Number | None:
    """A float as {"value", "hex"}, or as a bare JSON number from a writer that keeps no exact form."""
    value = fields.get(name)
    if value is None:
        return None
    bare = _float(value)
    if bare is not None:
        return Number(bare if math.isfinite(bare) else None, bare.hex())
    if not isinstance(value, dict):
        raise LineError(f"{name} is {_quote(value)}, not a number")
    inner, exact = _float(value.get("value")), value.get("hex")
    if not isinstance(exact, str) or (inner is None and value.get("value") is not None):
        raise LineError(f"{name} is {_quote(value)}, not value and hex")
    return Number(inner if inner is not None and math.isfinite(inner) else None, exact)


def _float(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


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
        return _whole(self.fields.get("step"))


class Plan(NamedTuple):
    """The plan of the start line; None for what the line leaves out. `ids` are the rows that an epoch visits."""

    rows: int | None = None
    ids: tuple[RowId, ...] | None = None
    batch_size: int | None = None
    seed: int | None = None
    steps: int | None = None


@dataclass(frozen=True, slots=True)
class StartEvent(Event):
    """The first line of a run that began anew."""

    plan: Plan = Plan()  # noqa: RUF009 -- it is immutable
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
    ids: tuple[RowId, ...] = ()
    weights: str | None = None
    optimizer: str | None = None
    gradient: str | None = None


def _ranks(fields: Fields, name: str) -> tuple[RankStep, ...]:
    found = []
    for entry in _held(fields, name, list):
        if not isinstance(entry, dict):
            raise LineError(f"ranks holds {_quote(entry)}, not an object")
        rank = _whole(entry.get("rank"))
        if rank is None:
            raise LineError(f"an entry of ranks has rank {_quote(entry.get('rank'))}")
        weights, optimizer, gradient = (_text(entry, name) for name in ("weights", "optimizer", "gradient"))
        found.append(RankStep(rank, _row_ids(entry, "ids"), weights, optimizer, gradient))
    return tuple(found)


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

    `weights_norm` is the 2-norm of the trained weights after it. `draws`: the modules that draw random numbers in its
    forward passes, as far as they are known. `state`: of the random streams and of the rows that a torch DataLoader
    drew, digests; the rows "in pass" so far, "of" all. No claim reads a line's other fields.

    A history holds hundreds of thousands of updates, so all but `number` and `epoch` is in `packed` (see `_pack`): ten
    times smaller than the objects. `fields` is empty.
    """

    number: int = 0
    epoch: int | None = None
    packed: bytes = b""

    ids = _Packed(_row_ids)
    count = _Packed(_integer)
    lr = _Packed(_real)
    loss = _Packed(_real)
    grad_norm = _Packed(_real)
    weights_norm = _Packed(_real)
    draws = _Packed(_text)
    world = _Packed(_integer)
    backend = _Packed(_text)
    digests = _Packed(_texts)
    state = _Packed(_texts)
    ranks = _Packed(_ranks)

    @property
    def step(self) -> int:
        return self.number

    def same_rows(self, other: StepEvent) -> bool:
        """Whether both updates are known to have the same rows: as reported, or as a torch DataLoader drew them."""
        if self.ids and other.ids:
            return Counter(self.ids) == Counter(other.ids)
        return "rows" in self.state and self.state["rows"] == other.state.get("rows")

    @property
    def finite(self) -> bool:
        """Whether the recorded loss and gradient norm of this update are finite."""
        return all(number.finite for number in (self.loss, self.grad_norm) if number is not None)


def _pack(fields: Fields) -> bytes:
    """The fields of a `StepEvent`. Ids of ranks that together are the batch, in its order, are packed once."""
    found = {name: reader(fields, name) for name, reader in _READERS.items()}
    ids, ranks = found["ids"], found.pop("ranks")
    split = [row for part in ranks for row in part.ids] == [*ids]
    parts = [(part.rank, len(part.ids) if split else part.ids, *part[2:]) for part in ranks]
    values = [tuple(value) if isinstance(value, Number) else value for value in found.values()]
    packed: Any = (values, parts)
    return marshal.dumps(packed)


@lru_cache(8)  # a check reads several fields of an update in a row
def _unpacked(packed: bytes) -> Mapping[str, Any]:
    values, parts = marshal.loads(packed)
    fields = dict(zip(_READERS, values, strict=False))
    for name, reader in _READERS.items():
        if reader is _real and fields[name] is not None:
            fields[name] = Number(*fields[name])
    ranks, at = [], 0
    for rank, ids, *digests in parts:
        if isinstance(ids, int):
            at, ids = at + ids, fields["ids"][at : at + ids]
        ranks.append(RankStep(rank, ids, *digests))
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

    Raises `LineError` for text that is not a JSON object, an unknown version or kind, or a field of a wrong type.
    """
    try:
        fields: object = json.loads(line_text, object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        raise LineError(f"not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise LineError(f"a {type(fields).__name__} where an object belongs")
    if _whole(fields.get("v")) != VERSION:
        raise LineError(f"version {_quote(fields.get('v'))} is not {VERSION}")
    kind = fields.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise LineError(f"kind {_quote(kind)} is none of {', '.join(sorted(KINDS))}")
    prev = _text(fields, "prev")
    # One object for both digests, since a history has hundreds of thousands of lines.
    head = (line, kind, _whole(fields.get("seq")), before if prev == before else prev, digest)
    if kind == "step":
        update = _whole(fields.get("step"))
        if update is None or update < 1:
            raise LineError(f"a step line whose step is {_quote(fields.get('step'))}, not a number from 1")
        return StepEvent(*head, _NO_FIELDS, number=update, epoch=_integer(fields, "epoch"), packed=_pack(fields))
    if kind == "retraction":
        kept, last = _whole(fields.get("step")), _whole(fields.get("last"))
        if kept is None or last is None or not 0 <= kept < last:
            raise LineError(f"a retraction from {_quote(kept)} to {_quote(last)}")
    if kind == "start":
        planned = _held(fields, "plan", dict)
        ids = _row_ids(planned, "ids") if planned.get("ids") is not None else None
        numbers = {name: _integer(planned, name) for name in Plan._fields if name != "ids"}
        initial = _text(_held(fields, "initial", dict) or _held(fields, "digests", dict), "weights")
        return StartEvent(*head, fields, plan=Plan(ids=ids, **numbers), initial_weights=initial)
    return Event(*head, fields)


_MOST_FLAGS = 1 << 26


class RowSet:
    """A set that holds an integer below 2**26 in one byte; a set of Python takes 70 bytes for each.

    Other ids (text, larger integers, negative ones) are in a set of Python.
    """

    def __init__(self, rows: Iterable[RowId] = ()) -> None:
        self._flags = bytearray()
        self._others: set[RowId] = set()
        self._size = 0
        self.add(rows)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RowSet):
            return NotImplemented
        return self._others == other._others and self._flags.rstrip(b"\0") == other._flags.rstrip(b"\0")

    def __len__(self) -> int:
        return self._size

    def add(self, rows: Iterable[RowId]) -> bool:
        """Add `rows`, and return whether all of them were new."""
        flags, others, new = self._flags, self._others, True
        for row in rows:
            if isinstance(row, int) and 0 <= row < _MOST_FLAGS:
                if row >= len(flags):
                    flags.extend(bytes(2 * row - len(flags) + 1024))
                known, flags[row] = flags[row], 1
            else:
                known = row in others
                others.add(row)
            self._size += not known
            new = new and not known
        return new

    def integers(self) -> array[int]:
        """Its integers in rising order, 8 bytes each."""
        others = sorted(row for row in self._others if isinstance(row, int))
        found = array("q", (row for row in others if row < 0))
        found.extend(compress(range(len(self._flags)), self._flags))
        found.extend(row for row in others if row > 0)
        return found
