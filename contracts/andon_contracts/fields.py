"""Typed fields of JSON objects: dataclasses that read and write themselves, strictly and to the bit.

A field may be younger than its format (`since`), or may be left out only since a version (`may_lack`): an object of an
older version is read by the rules that it was written under.
"""

from __future__ import annotations

import dataclasses
import math
import re
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin, get_type_hints

_HEX16 = re.compile(r"[0-9a-f]{16}")
_SINCE, _OPTIONAL = "since", "optional since"
_NEWEST = 1 << 31
_PAIR = {"hex", "value"}

Hex16 = Annotated[str, "hex16"]
"""A digest: 16 lower-case hexadecimal digits."""
Count = Annotated[int, "count"]
"""An integer in [0, 2^63)."""
Seconds = Annotated[float, "seconds"]
"""A float that is finite and not negative."""


def since(version: int) -> Mapping[str, int]:
    """Metadata of a field that objects before `version` do not have; its default is None."""
    return {_SINCE: version}


def may_lack(version: int) -> Mapping[str, int]:
    """Metadata of a field that objects before `version` must have; from then on it may be left out, and is None."""
    return {_OPTIONAL: version}


@dataclass(frozen=True)
class Real:
    """A real number that compares to the bit and survives JSON: `float.hex()`, with the value beside it for people.

    NaN and the infinities have the hex `nan`, `inf` and `-inf`, and the value null. NaNs of all payloads are one.
    """

    hex: str

    @classmethod
    def of(cls, value: float) -> Self:
        """The record of `value`."""
        return cls(float(value).hex())

    @property
    def value(self) -> float:
        """The number itself."""
        return float.fromhex(self.hex)

    def to_json(self) -> dict[str, object]:
        """The pair `{"value", "hex"}`."""
        return {"hex": self.hex, "value": self.value if math.isfinite(self.value) else None}

    @classmethod
    def from_json(cls, data: object, where: str = "real") -> Self:
        """The inverse of `to_json`. Raises `ValueError` where value and hex do not say the same."""
        if not isinstance(data, dict) or data.keys() != _PAIR or not isinstance(data["hex"], str):
            raise _fault(where, "{value, hex}", json_object(data, where))
        text, value = data["hex"], data["value"]
        try:
            real = cls.of(float.fromhex(text))
            finite = isinstance(value, int | float) and not isinstance(value, bool) and cls.of(value) == real
        except (ValueError, OverflowError):
            raise _fault(where, "a hexadecimal float", data) from None
        if real.hex != text or not (finite if math.isfinite(real.value) else value is None):
            raise _fault(where, "a value that is its hex", data)
        return real


@dataclass(frozen=True)
class Part:
    """A record or a piece of one. Fields that are None are left out of the line."""

    def to_json(self) -> dict[str, object]:
        """Plain JSON values by field name."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {name: _plain(value) for name, value in values.items() if value is not None}

    @classmethod
    def from_json(cls, data: object, where: str = "", version: int = _NEWEST) -> Self:
        """The inverse of `to_json`, by the rules of `version`.

        Raises `ValueError` naming a field that is missing, unknown or ill-typed.
        """
        specs = _specs(cls, version)
        if not isinstance(data, dict) or not data.keys() <= specs.keys():
            found = json_object(data, where or cls.__name__.lower())
            unknown = sorted(set(found) - specs.keys())
            raise ValueError(f"{where or cls.__name__.lower()} has the unknown field {unknown[0]!r}")
        values = {}
        for name, (read, left_out) in specs.items():
            if name in data:
                values[name] = read(data[name], f"{where}.{name}" if where else name, version)
            elif left_out is _MISSING:
                raise ValueError(f"{where}.{name} is missing" if where else f"{name} is missing")
            elif left_out is None:
                values[name] = None
        return cls(**values)


def _fault(where: str, wanted: str, found: object) -> ValueError:
    text = repr(found)
    return ValueError(f"{where} must be {wanted}, not {text if len(text) <= 80 else text[:77] + '...'}")


def json_object(data: object, where: str) -> dict[str, Any]:
    """`data` if it is a JSON object. Raises `ValueError` naming `where` otherwise."""
    if not isinstance(data, dict) or not all(isinstance(name, str) for name in data):
        raise _fault(where, "an object", data)
    return data


def _plain(value: object) -> object:
    if isinstance(value, Real | Part):
        return value.to_json()
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


_Reader = Callable[[Any, str, int], Any]
"""From a value of JSON, the place that a message names, and a version to what the value is read as."""
_MISSING, _DEFAULT = object(), object()
"""A field that is left out is a mistake, or has the default of its class. A ledger has millions of fields: what a type
says of the reading is worked out once."""

_Specs = Mapping[str, tuple[_Reader, object]]
_known_specs: dict[tuple[type[Part], int], _Specs] = {}


def _specs(part: type[Part], version: int) -> _Specs:
    """By name, the fields of `part` that an object of `version` may have, and what it means that one is left out."""
    if (part, version) not in _known_specs:
        _known_specs[part, version] = _specs_of(part, version)
    return _known_specs[part, version]


def _specs_of(part: type[Part], version: int) -> _Specs:
    hints = get_type_hints(part, include_extras=True)
    found: dict[str, tuple[_Reader, object]] = {}
    for spec in dataclasses.fields(part):
        if spec.metadata.get(_SINCE, 0) <= version:
            required = spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING
            may_lack = spec.metadata.get(_OPTIONAL, _NEWEST + 1) <= version
            left_out = None if may_lack else _MISSING if required else _DEFAULT
            found[spec.name] = (_reader(hints[spec.name]), left_out)
    return found


def read_field(hint: Any, value: Any, where: str, version: int = _NEWEST) -> Any:
    """`value` from JSON as what `hint` says in `version`. Raises `ValueError` naming `where` otherwise."""
    return _reader(hint)(value, where, version)


@cache
def _reader(hint: Any) -> _Reader:
    if hint is Any:
        return lambda value, where, version: value
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        (only,) = (option for option in inner if option is not type(None))
        return _reader(only)
    if origin is Annotated:
        return _MARKED[inner[1]]
    if origin is tuple:
        return _read_counts if inner[0] == Count else _list_reader(_reader(inner[0]))
    if origin is Literal:
        return _choice_reader(inner)
    if origin is not None:
        return _object_reader(_reader(inner[1]))
    if issubclass(hint, Part):
        read: _Reader = hint.from_json
        return read
    if issubclass(hint, Real):
        return lambda value, where, version: hint.from_json(value, where)
    return _plain_reader(hint)


def _list_reader(read: _Reader) -> _Reader:
    def items(value: Any, where: str, version: int) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise _fault(where, "a list", value)
        return tuple(read(item, f"{where}[{i}]", version) for i, item in enumerate(value))

    return items


def _choice_reader(options: tuple[str, ...]) -> _Reader:
    def choice(value: Any, where: str, version: int) -> str:
        if type(value) is not str or value not in options:
            raise _fault(where, f"one of {', '.join(options)}", value)
        return value

    return choice


def _object_reader(read: _Reader) -> _Reader:
    def entries(value: Any, where: str, version: int) -> dict[str, Any]:
        return {name: read(item, f"{where}.{name}", version) for name, item in json_object(value, where).items()}

    return entries


def _plain_reader(kind: type) -> _Reader:
    def plain(value: Any, where: str, version: int) -> Any:
        if type(value) is not kind:
            raise _fault(where, f"a {kind.__name__}", value)
        return value

    return plain


def _read_count(value: Any, where: str, version: int) -> int:
    if type(value) is int and 0 <= value < _COUNTS:
        return value
    raise _fault(where, "an integer from 0", value)


def _read_seconds(value: Any, where: str, version: int) -> float:
    if type(value) is float and 0 <= value < math.inf:
        return value
    raise _fault(where, "a finite float from 0", value)


def _read_hex16(value: Any, where: str, version: int) -> str:
    if isinstance(value, str) and _HEX16.fullmatch(value):
        return value
    raise _fault(where, "16 hexadecimal digits", value)


_COUNTS = 1 << 63
_MARKED: Mapping[str, _Reader] = {"count": _read_count, "seconds": _read_seconds, "hex16": _read_hex16}
_each_count = _list_reader(_read_count)


def _read_counts(value: Any, where: str, version: int) -> tuple[int, ...]:
    # The rows of a batch: most of what a ledger holds. Where one of them is wrong, the slower way names it.
    right = type(value) is list and {*map(type, value)} == {int} and min(value) >= 0 and max(value) < _COUNTS
    return tuple(value) if right else _each_count(value, where, version)
