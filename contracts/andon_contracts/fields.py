"""Typed fields of JSON objects: dataclasses that read and write themselves, strictly and to the bit.

A field may be younger than its format (`since`), or may be left out only since a version (`may_lack`): an object of an
older version is read by the rules that it was written under.
"""

from __future__ import annotations

import dataclasses
import math
import re
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin, get_type_hints

_HEX16 = re.compile(r"[0-9a-f]{16}")
_SINCE, _OPTIONAL = "since", "optional since"
_NEWEST = 1 << 31

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
        found = json_object(data, where)
        text, value = found.get("hex"), found.get("value")
        if set(found) != {"hex", "value"} or not isinstance(text, str):
            raise _fault(where, "{value, hex}", data)
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
        found = json_object(data, where or cls.__name__.lower())
        hints = _hints(cls)
        specs = [spec for spec in dataclasses.fields(cls) if spec.metadata.get(_SINCE, 0) <= version]
        unknown = sorted(set(found) - {spec.name for spec in specs})
        if unknown:
            raise ValueError(f"{where or cls.__name__.lower()} has the unknown field {unknown[0]!r}")
        values = {}
        for spec in specs:
            place = f"{where}.{spec.name}" if where else spec.name
            if spec.name in found:
                values[spec.name] = read_field(hints[spec.name], found[spec.name], place, version)
            elif spec.metadata.get(_OPTIONAL, _NEWEST + 1) <= version:
                values[spec.name] = None
            elif spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING:
                raise ValueError(f"{place} is missing")
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


_known_hints: dict[type[Part], Mapping[str, Any]] = {}


def _hints(part: type[Part]) -> Mapping[str, Any]:
    if part not in _known_hints:
        hints = get_type_hints(part, include_extras=True)
        _known_hints[part] = {spec.name: hints[spec.name] for spec in dataclasses.fields(part)}
    return _known_hints[part]


def read_field(hint: Any, value: Any, where: str, version: int = _NEWEST) -> Any:
    """`value` from JSON as what `hint` says in `version`. Raises `ValueError` naming `where` otherwise."""
    if hint is Any:
        return value
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        (hint,) = (option for option in get_args(hint) if option is not type(None))
        return read_field(hint, value, where, version)
    if origin is Annotated:
        return _read_marked(get_args(hint)[1], value, where)
    if origin is tuple:
        if not isinstance(value, list):
            raise _fault(where, "a list", value)
        if get_args(hint)[0] == Count and all(map(_is_count, value)):
            return tuple(value)
        return tuple(read_field(get_args(hint)[0], item, f"{where}[{i}]", version) for i, item in enumerate(value))
    if origin is Literal:
        if type(value) is not str or value not in get_args(hint):
            raise _fault(where, f"one of {', '.join(get_args(hint))}", value)
        return value
    if origin is not None:
        return {
            name: read_field(get_args(hint)[1], item, f"{where}.{name}", version)
            for name, item in json_object(value, where).items()
        }
    if issubclass(hint, Part):
        return hint.from_json(value, where, version)
    if issubclass(hint, Real):
        return hint.from_json(value, where)
    if type(value) is not hint:
        raise _fault(where, f"a {hint.__name__}", value)
    return value


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _read_marked(mark: str, value: object, where: str) -> object:
    if mark == "count":
        if not _is_count(value):
            raise _fault(where, "an integer from 0", value)
    elif mark == "seconds":
        if type(value) is not float or not 0 <= value < math.inf:
            raise _fault(where, "a finite float from 0", value)
    elif not isinstance(value, str) or not _HEX16.fullmatch(value):
        raise _fault(where, "16 hexadecimal digits", value)
    return value
