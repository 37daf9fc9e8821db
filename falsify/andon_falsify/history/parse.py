"""One line of a ledger to one event. What does not fit is a `LineError` with the reason, for the reader to report."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping
from typing import Any

from andon_falsify.history.events import Event, Number, Plan, RankStep, RowId, StartEvent, StepEvent, pack, whole

VERSION = 4
"""The only version of a line. Fields that a line leaves out are None."""
KINDS = frozenset({"start", "step", "eval", "checkpoint", "resume", "violation", "retraction", "end"})

_NO_FIELDS: Mapping[str, object] = {}


class LineError(ValueError):
    """Why a line is not an event of the schema."""


def parse_line(text: str, line: int, digest: str, before: str = "") -> Event:
    """The event that `text` (a line without its newline) states. digest, before: of this line and the previous one.

    Raises `LineError` for text that is no JSON object, another version, an unknown kind, or a field of a wrong type.
    """
    fields = _object(text)
    if whole(fields.get("v")) != VERSION:
        msg = f"version {_quote(fields.get('v'))} is not {VERSION}"
        raise LineError(msg)
    kind = fields.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        msg = f"kind {_quote(kind)} is none of {', '.join(sorted(KINDS))}"
        raise LineError(msg)
    seq, prev = whole(fields.get("seq")), _text(fields, "prev")
    prev = before if prev == before else prev  # one object for both: a history has hundreds of thousands
    if kind == "step":
        return _step(fields, line, seq, prev, digest)
    if kind == "retraction":
        _retraction(fields)
    if kind == "start":
        plan = _plan(_mapping(fields, "plan"))
        initial = _text(_mapping(fields, "initial") or _mapping(fields, "digests"), "weights")
        return StartEvent(line, kind, seq, prev, digest, fields, plan=plan, initial_weights=initial)
    return Event(line, kind, seq, prev, digest, fields)


def _object(text: str) -> Mapping[str, object]:
    try:
        value = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        msg = f"not JSON: {error}"
        raise LineError(msg) from error
    if not isinstance(value, dict):
        msg = f"a {type(value).__name__} where an object belongs"
        raise LineError(msg)
    return value


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """An object of JSON. One that says a thing twice says two things: which of them is read, depends on the reader."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in found if names.count(name) > 1)
        msg = f"{_quote(twice)} stands twice in one object"
        raise ValueError(msg)
    return found


def _step(fields: Mapping[str, object], line: int, seq: int | None, prev: str | None, digest: str) -> StepEvent:
    number = whole(fields.get("step"))
    if number is None or number < 1:
        msg = f"a step line whose step is {_quote(fields.get('step'))}, not a number from 1"
        raise LineError(msg)
    epoch = _int(fields, "epoch")
    # The first wrong field in this order is named.
    held: dict[str, object] = {"position": _int(fields, "position"), "ids": _ids(fields, "ids")}
    held |= {name: _int(fields, name) for name in ("count", "correct", "terms")}
    held |= {name: _number(fields, name) for name in ("lr", "loss", "grad_norm", "weights_norm")}
    held |= {"gradient_at": _text(fields, "gradient_at"), "skipped": fields.get("skipped") is True}
    held |= {"draws": _text(fields, "draws"), "world": _int(fields, "world"), "backend": _text(fields, "backend")}
    held |= {"digests": _digests(fields), "ranks": tuple(_rank(entry) for entry in _list(fields, "ranks"))}
    return StepEvent(line, "step", seq, prev, digest, _NO_FIELDS, number=number, epoch=epoch, packed=pack(held))


def _retraction(fields: Mapping[str, object]) -> None:
    kept, last = whole(fields.get("step")), whole(fields.get("last"))
    if kept is None or last is None or not 0 <= kept < last:
        msg = f"a retraction from {_quote(kept)} to {_quote(last)}"
        raise LineError(msg)


def _rank(entry: object) -> RankStep:
    if not isinstance(entry, dict):
        msg = f"ranks holds {_quote(entry)}, not an object"
        raise LineError(msg)
    rank = whole(entry.get("rank"))
    if rank is None:
        msg = f"an entry of ranks has rank {_quote(entry.get('rank'))}"
        raise LineError(msg)
    leaves = tuple(_leaf(leaf) for leaf in _list(entry, "leaves"))
    weights, optimizer, gradient = (_text(entry, name) for name in ("weights", "optimizer", "gradient"))
    return RankStep(rank, leaves, _ids(entry, "ids"), weights, optimizer, gradient)


def _plan(fields: Mapping[str, object]) -> Plan:
    return Plan(
        rows=_int(fields, "rows"),
        ids=_ids(fields, "ids") if fields.get("ids") is not None else None,
        batch_size=_int(fields, "batch_size"),
        micro_batches=_int(fields, "micro_batches"),
        seed=_int(fields, "seed"),
        epochs=_int(fields, "epochs"),
        steps=_int(fields, "steps"),
    )


def _number(fields: Mapping[str, object], name: str) -> Number | None:
    """A float as {"value", "hex"}, or as a bare JSON number from a writer that keeps no exact form."""
    value = fields.get(name)
    if value is None:
        return None
    bare = _float(value)
    if bare is not None:
        return Number(bare if math.isfinite(bare) else None, bare.hex())
    if not isinstance(value, dict):
        msg = f"{name} is {_quote(value)}, not a number"
        raise LineError(msg)
    inner, exact = _float(value.get("value")), value.get("hex")
    if not isinstance(exact, str) or (inner is None and value.get("value") is not None):
        msg = f"{name} is {_quote(value)}, not value and hex"
        raise LineError(msg)
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
    return tuple(_row(entry, name) for entry in entries)


def _row(entry: object, name: str) -> RowId:
    row = entry if isinstance(entry, str) else whole(entry)
    if row is None:
        msg = f"{name} holds {_quote(entry)}, not a row id"
        raise LineError(msg)
    return row


def _leaf(entry: object) -> int:
    leaf = whole(entry)
    if leaf is None:
        msg = f"leaves holds {_quote(entry)}"
        raise LineError(msg)
    return leaf


def _digests(fields: Mapping[str, object]) -> Mapping[str, str]:
    held = _mapping(fields, "digests")
    return {name: value for name in held if (value := _text(held, name)) is not None}


def _int(fields: Mapping[str, object], name: str) -> int | None:
    value = fields.get(name)
    number = whole(value)
    if number is None and value is not None:
        msg = f"{name} is {_quote(value)}, not an integer"
        raise LineError(msg)
    return number


def _text(fields: Mapping[str, object], name: str) -> str | None:
    value = fields.get(name)
    if value is None or isinstance(value, str):
        return value or None
    msg = f"{name} is {_quote(value)}, not text"
    raise LineError(msg)


def _list(fields: Mapping[str, object], name: str) -> list[Any]:
    value = fields.get(name)
    if value is None:
        return []
    if isinstance(value, list):
        return value
    msg = f"{name} is {_quote(value)}, not a list"
    raise LineError(msg)


def _mapping(fields: Mapping[str, object], name: str) -> Mapping[str, object]:
    value = fields.get(name)
    if value is None:
        return {}
    if isinstance(value, dict):
        return value
    msg = f"{name} is {_quote(value)}, not an object"
    raise LineError(msg)


def _quote(value: object) -> str:
    """A repr of bounded length: a line may be megabytes long."""
    return reprlib.repr(value)
