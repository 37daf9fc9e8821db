"""How the fields of a ledger line are read: an absent field is empty, and a wrong one is a `LineError` with the reason.

This reader follows the published form of the ledger and shares no code with the writer, so a mistake of the writer is
not read back by the same mistake.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

RowId = int | str
"""The id of a row of the dataset: its index, or the key that its owner gave it."""
Fields = Mapping[str, object]
_Kind = TypeVar("_Kind")
quote = reprlib.repr  # of bounded length: a line may be megabytes long


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


def json_object(text: str) -> Fields:
    try:
        value = json.loads(text, object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        raise LineError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise LineError(f"a {type(value).__name__} where an object belongs")
    return value


def _without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Refuses a name that is given twice, since readers of JSON disagree on which of the two values counts."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in found if names.count(name) > 1)
        raise ValueError(f"{quote(twice)} stands twice in one object")
    return found


def whole(value: object) -> int | None:
    """`value` if it is a JSON integer of 64 bits, else None (true and false are not numbers here)."""
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63 else None


def integer(fields: Fields, name: str) -> int | None:
    value = fields.get(name)
    number = whole(value)
    if number is None and value is not None:
        raise LineError(f"{name} is {quote(value)}, not an integer")
    return number


def text(fields: Fields, name: str) -> str | None:
    """Empty text is None, as an absent field is."""
    return _of_kind(fields, name, str, "text") or None


def flag(fields: Fields, name: str) -> bool:
    return fields.get(name) is True


def array(fields: Fields, name: str) -> list[Any]:
    return _of_kind(fields, name, list, "a list")


def mapping(fields: Fields, name: str) -> Fields:
    return _of_kind(fields, name, dict, "an object")


def texts(fields: Fields, name: str) -> Mapping[str, str]:
    """An object of texts, without the empty ones."""
    held = mapping(fields, name)
    return {key: found for key in held if (found := text(held, key)) is not None}


def _of_kind(fields: Fields, name: str, kind: type[_Kind], what: str) -> _Kind:
    value = fields.get(name)
    if value is None or isinstance(value, kind):
        return kind() if value is None else value
    raise LineError(f"{name} is {quote(value)}, not {what}")


def row_ids(fields: Fields, name: str) -> tuple[RowId, ...]:
    entries = array(fields, name)
    # Row ids are most of a ledger: if all are integers, the least and the greatest decide for all of them.
    if {*map(type, entries)} == {int} and None not in (whole(min(entries)), whole(max(entries))):
        return tuple(entries)
    for entry in entries:
        if not isinstance(entry, str) and whole(entry) is None:
            raise LineError(f"{name} holds {quote(entry)}, not a row id")
    return tuple(entries)


def real(fields: Fields, name: str) -> Number | None:
    """A float as {"value", "hex"}, or as a bare JSON number from a writer that keeps no exact form."""
    value = fields.get(name)
    if value is None:
        return None
    bare = _float(value)
    if bare is not None:
        return Number(bare if math.isfinite(bare) else None, bare.hex())
    if not isinstance(value, dict):
        raise LineError(f"{name} is {quote(value)}, not a number")
    inner, exact = _float(value.get("value")), value.get("hex")
    if not isinstance(exact, str) or (inner is None and value.get("value") is not None):
        raise LineError(f"{name} is {quote(value)}, not value and hex")
    return Number(inner if inner is not None and math.isfinite(inner) else None, exact)


def _float(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
