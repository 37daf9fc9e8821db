"""One line of a ledger to one event. What does not fit is a `LineError` with the reason, for the reader to report."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping
from typing import Any, TypeVar

from andon_falsify.history.events import Event, Number, Plan, RankStep, RowId, StartEvent, StepEvent, pack, whole

VERSION = 4
"""The only version of a line. Fields that a line leaves out are None."""
KINDS = frozenset({"start", "step", "eval", "checkpoint", "resume", "violation", "retraction", "end"})

_NO_FIELDS: Mapping[str, object] = {}
_Kind = TypeVar("_Kind")
_quote = reprlib.repr  # of bounded length: a line may be megabytes long


class LineError(ValueError):
    """Why a line is not an event of the schema."""


def parse_line(text: str, line: int, digest: str, before: str = "") -> Event:
    """The event that `text` (a line without its newline) states. digest, before: of this line and the previous one.

    Raises `LineError` for text that is no JSON object, another version, an unknown kind, or a field of a wrong type.
    """
    fields = _object(text)
    if whole(fields.get("v")) != VERSION:
        raise LineError(f"version {_quote(fields.get('v'))} is not {VERSION}")
    kind = fields.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise LineError(f"kind {_quote(kind)} is none of {', '.join(sorted(KINDS))}")
    seq, prev = whole(fields.get("seq")), _text(fields, "prev")
    prev = before if prev == before else prev  # one object for both: a history has hundreds of thousands
    if kind == "step":
        return _step(fields, line, seq, prev, digest)
    if kind == "retraction":
        kept, last = whole(fields.get("step")), whole(fields.get("last"))
        if kept is None or last is None or not 0 <= kept < last:
            raise LineError(f"a retraction from {_quote(kept)} to {_quote(last)}")
    if kind == "start":
        plan = _plan(_mapping(fields, "plan"))
        initial = _text(_mapping(fields, "initial") or _mapping(fields, "digests"), "weights")
        return StartEvent(line, kind, seq, prev, digest, fields, plan=plan, initial_weights=initial)
    return Event(line, kind, seq, prev, digest, fields)


def _object(text: str) -> Mapping[str, object]:
    try:
        value = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise LineError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise LineError(f"a {type(value).__name__} where an object belongs")
    return value


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """An object of JSON. One that says a thing twice says two things: which of them is read, depends on the reader."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in found if names.count(name) > 1)
        raise ValueError(f"{_quote(twice)} stands twice in one object")
    return found


def _step(fields: Mapping[str, object], line: int, seq: int | None, prev: str | None, digest: str) -> StepEvent:
    number = whole(fields.get("step"))
    if number is None or number < 1:
        raise LineError(f"a step line whose step is {_quote(fields.get('step'))}, not a number from 1")
    epoch = _int(fields, "epoch")
    # The first wrong field in this order is named.
    held: dict[str, object] = {"position": _int(fields, "position"), "ids": _ids(fields, "ids")}
    held |= {name: _int(fields, name) for name in ("count", "correct", "terms")}
    held |= {name: _number(fields, name) for name in ("lr", "loss", "grad_norm", "weights_norm")}
    held |= {"gradient_at": _text(fields, "gradient_at"), "skipped": fields.get("skipped") is True}
    held |= {"draws": _text(fields, "draws"), "world": _int(fields, "world"), "backend": _text(fields, "backend")}
    digests = _mapping(fields, "digests")
    held["digests"] = {name: text for name in digests if (text := _text(digests, name)) is not None}
    packed = pack(held, tuple(map(_rank, _list(fields, "ranks"))))
    return StepEvent(line, "step", seq, prev, digest, _NO_FIELDS, number=number, epoch=epoch, packed=packed)


def _rank(entry: object) -> RankStep:
    if not isinstance(entry, dict):
        raise LineError(f"ranks holds {_quote(entry)}, not an object")
    rank = whole(entry.get("rank"))
    if rank is None:
        raise LineError(f"an entry of ranks has rank {_quote(entry.get('rank'))}")
    leaves = _list(entry, "leaves")
    if None in map(whole, leaves):
        raise LineError(f"leaves holds {_quote(next(leaf for leaf in leaves if whole(leaf) is None))}")
    weights, optimizer, gradient = (_text(entry, name) for name in ("weights", "optimizer", "gradient"))
    return RankStep(rank, tuple(leaves), _ids(entry, "ids"), weights, optimizer, gradient)


def _plan(fields: Mapping[str, object]) -> Plan:
    names = ("rows", "batch_size", "micro_batches", "seed", "epochs", "steps")
    ids = _ids(fields, "ids") if fields.get("ids") is not None else None
    return Plan(ids=ids, **{name: _int(fields, name) for name in names})


def _number(fields: Mapping[str, object], name: str) -> Number | None:
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


def _ids(fields: Mapping[str, object], name: str) -> tuple[RowId, ...]:
    entries = _list(fields, name)
    # Most of what a ledger holds: of integers alone the least and the greatest say whether all are row ids.
    if {*map(type, entries)} == {int} and None not in (whole(min(entries)), whole(max(entries))):
        return tuple(entries)
    for entry in entries:
        if not isinstance(entry, str) and whole(entry) is None:
            raise LineError(f"{name} holds {_quote(entry)}, not a row id")
    return tuple(entries)


def _int(fields: Mapping[str, object], name: str) -> int | None:
    value = fields.get(name)
    number = whole(value)
    if number is None and value is not None:
        raise LineError(f"{name} is {_quote(value)}, not an integer")
    return number


def _text(fields: Mapping[str, object], name: str) -> str | None:
    value = fields.get(name)
    if value is None or isinstance(value, str):
        return value or None
    raise LineError(f"{name} is {_quote(value)}, not text")


def _list(fields: Mapping[str, object], name: str) -> list[Any]:
    return _held(fields, name, list, "a list")


def _mapping(fields: Mapping[str, object], name: str) -> Mapping[str, object]:
    return _held(fields, name, dict, "an object")


def _held(fields: Mapping[str, object], name: str, kind: type[_Kind], what: str) -> _Kind:
    value = fields.get(name)
    if value is None or isinstance(value, kind):
        return kind() if value is None else value
    raise LineError(f"{name} is {_quote(value)}, not {what}")
