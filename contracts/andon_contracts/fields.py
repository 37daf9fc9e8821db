"""Dataclasses that convert themselves to JSON objects and back, strictly and bit for bit."""

from __future__ import annotations

import dataclasses
import math
import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Annotated, Any, Literal, NoReturn, Self, Union, get_args, get_origin, get_type_hints

_COUNTS = 1 << 63
_HEX16 = re.compile("[0-9a-f]{16}").fullmatch
# Types of fields, each with a predicate for its values and their description.
Hex16 = Annotated[str, (lambda value: type(value) is str and _HEX16(value), "16 hexadecimal digits")]
Count = Annotated[int, (lambda value: type(value) is int and 0 <= value < _COUNTS, "an integer from 0")]
Seconds = Annotated[float, (lambda value: type(value) is float and 0 <= value < math.inf, "a finite float from 0")]
_Reader = Callable[[Any, str], Any]  # from a JSON value and its place to the field's value; raises `ValueError`


@dataclass(frozen=True)
class Real:
    """A float with exact equality, as `float.hex()`: `nan`, `inf` and `-inf` too. All NaNs are equal.

    The JSON adds the decimal value for human readers; it is null for NaN and the infinities.
    """

    hex: str

    @classmethod
    def of(cls, value: float) -> Self:
        return cls(float(value).hex())

    @property
    def value(self) -> float:
        return float.fromhex(self.hex)

    def to_json(self) -> dict[str, object]:
        return {"hex": self.hex, "value": self.value if math.isfinite(self.value) else None}

    @classmethod
    def from_json(cls, data: object, where: str = "real") -> Self:
        if not isinstance(data, dict) or data.keys() != {"hex", "value"} or not isinstance(data["hex"], str):
            _refuse(where, "{value, hex}", json_object(data, where))
        text, value = data["hex"], data["value"]
        try:
            if type(value) in (int, float) and float(value).hex() == text and math.isfinite(value):
                return cls(text)
            number = float.fromhex(text)
        except (ValueError, OverflowError):
            _refuse(where, "a hexadecimal float", data)
        if number.hex() != text or value is not None or math.isfinite(number):
            _refuse(where, "equal in value and hex", data)
        return cls(text)


@dataclass(frozen=True)
class Part:
    """Base of a record and of its nested objects. The JSON omits fields without a value (None)."""

    def to_json(self) -> dict[str, object]:
        values = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        return {name: _to_json(value) for name, value in values if value is not None}

    @classmethod
    def from_json(cls, data: object, where: str = "") -> Self:
        """The inverse of `to_json`. Raises `ValueError` naming a field that is missing, unknown or ill-typed."""
        readers, required, defaults = _fields(cls)  # type: ignore[arg-type] # mypy: `type[Self]` is not hashable
        if not isinstance(data, dict) or not data.keys() <= readers.keys():
            name = where or cls.__name__.lower()
            raise ValueError(f"{name} has the unknown field {min(json_object(data, name).keys() - readers.keys())!r}")
        prefix = f"{where}." if where else ""
        if missing := [name for name in required if name not in data]:
            raise ValueError(f"{prefix}{missing[0]} is missing")
        # A frozen dataclass's own constructor takes as long to set the fields as to read them.
        part = object.__new__(cls)
        part.__dict__.update(defaults | {name: readers[name](value, prefix + name) for name, value in data.items()})
        return part


def no_constant(name: str) -> NoReturn:  # for `json.loads`: refuses NaN and the infinities
    raise ValueError(f"{name} is not JSON")


def json_object(data: object, where: str) -> dict[str, Any]:
    """`data` if it is a JSON object. Raises `ValueError` naming `where` otherwise."""
    if not isinstance(data, dict) or not {*map(type, data)} <= {str}:
        _refuse(where, "an object", data)
    return data


def read_field(hint: Any, value: Any, where: str) -> Any:
    """The JSON value `value` as the type `hint`. Raises `ValueError` naming `where` otherwise."""
    return _reader(hint)(value, where)


def _refuse(where: str, wanted: str, value: object) -> NoReturn:
    text = repr(value)
    raise ValueError(f"{where} must be {wanted}, not {text if len(text) <= 80 else text[:77] + '...'}") from None


def _to_json(value: object) -> object:
    if isinstance(value, Real | Part):
        return value.to_json()
    if isinstance(value, Mapping):
        return {name: _to_json(item) for name, item in value.items()}
    return [_to_json(item) for item in value] if isinstance(value, tuple) else value


@cache  # a ledger has millions of fields
def _fields(part: type[Part]) -> tuple[Mapping[str, _Reader], Sequence[str], dict[str, object]]:
    """The reader of each field; the fields that the JSON must have; and the values of those that it lacks."""
    hints, specs = get_type_hints(part, include_extras=True), dataclasses.fields(part)
    absent = {spec.name: None for spec in specs if type(None) in get_args(hints[spec.name])}
    made = {spec.name: spec.default_factory() for spec in specs if spec.default_factory is not dataclasses.MISSING}
    defaults = absent | made | {s.name: s.default for s in specs if s.default is not dataclasses.MISSING}
    return {s.name: _reader(hints[s.name]) for s in specs}, [s.name for s in specs if s.name not in defaults], defaults


@cache
def _reader(hint: Any) -> _Reader:
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return lambda value, where: value
    if origin in (Union, types.UnionType):
        (only,) = (option for option in inner if option is not type(None))
        return _reader(only)
    if origin is Annotated:
        return _reader_if(*inner[1])
    if origin is tuple:
        return _read_counts if inner[0] == Count else partial(_read_list, _reader(inner[0]))
    if origin is Literal:
        return _reader_if(lambda value: type(value) is str and value in inner, f"one of {', '.join(inner)}")
    if origin is not None:
        read = _reader(inner[1])
        return lambda value, at: {name: read(item, f"{at}.{name}") for name, item in json_object(value, at).items()}
    if issubclass(hint, Part | Real):
        return hint.from_json  # type: ignore[no-any-return]
    return _reader_if(lambda value: type(value) is hint, f"a {hint.__name__}")


def _reader_if(right: Callable[[Any], object], wanted: str) -> _Reader:
    return lambda value, where: value if right(value) else _refuse(where, wanted, value)


def _read_list(read: _Reader, value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        _refuse(where, "a list", value)
    return tuple(read(item, f"{where}[{i}]") for i, item in enumerate(value))


def _read_counts(value: Any, where: str) -> tuple[int, ...]:
    # Most of a ledger is row ids: check the whole list at once, and read item by item only to name the wrong item.
    right = type(value) is list and {*map(type, value)} == {int} and min(value) >= 0 and max(value) < _COUNTS
    return tuple(value) if right else _read_list(_reader(Count), value, where)
