"""Digests of nested tensors, arrays and plain values: of all their content, and equal in every process.

`repr` alone will not do: it shortens a large tensor or array, orders a set by the hash seed of its process, and shows
the address of an object without its own `repr`.
"""

from __future__ import annotations

import ctypes
import dataclasses
import datetime
import decimal
import enum
import fractions
import hashlib
import pathlib
import uuid
import zlib
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from andon_contracts.digest import join, tensor_digest
from andon_contracts.observe import plain

_AS_THEY_ARE = frozenset({type(None), bool, int, float, complex, str, bytes})
_BY_REPR = (
    int, float, str, bytes, bytearray, range, slice, type(...), datetime.date, datetime.time, datetime.timedelta,
    decimal.Decimal, fractions.Fraction, uuid.UUID, pathlib.PurePath,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
"""Types whose `repr` says all of a value, and the same in every process."""
_OWN = 3
"""Levels of a nest that the caller builds for each call, so no other code can change them."""


def text_digest(*parts: object) -> int:
    """A digest in [0, 2^62) of plain values that have a stable `repr`."""
    data = repr(parts).encode("utf-8", "backslashreplace")
    return zlib.crc32(data) << 30 ^ zlib.adler32(data)


def layout_digest(tensors: Mapping[str, Tensor]) -> int:
    """The digest of names, shapes and dtypes in order."""
    return text_digest([(name, tuple(t.shape), str(t.dtype)) for name, t in tensors.items()])


def trainable_layout_digest(tensors: Mapping[str, Tensor]) -> int:
    """`layout_digest` with which tensors are trained: a loop that reduces by hand takes the trained ones in order."""
    return text_digest([(layout_digest(tensors), [t.requires_grad for t in tensors.values()])])


def value_digest(value: object, name: str) -> int:
    """A digest in [0, 2^62) of `value`, equal in every process for equal values; name: what to call `value`.

    The order of a mapping or set does not count. A list and a tuple of the same items have one digest; a tensor and an
    array of the same numbers have two. Raises `ValueError`, with the place in `value`, for anything but tensors,
    arrays, dataclasses, mappings, sequences, sets and plain values.
    """
    foreign: list[object] = []
    digest = text_digest(_form(value, foreign))
    if foreign:
        kind = f"{type(foreign[0]).__module__}.{type(foreign[0]).__qualname__}"
        msg = f"{name}{_place(value)} is a {kind}, which cannot be compared: give a tensor or plain values"
        raise ValueError(msg)
    return digest


def lenient_digest(value: object) -> int:
    """`value_digest` for the state of other code: what cannot be compared, such as a function, counts by its type."""
    try:
        return text_digest(_form(value, []))
    except RecursionError:  # it may contain itself
        return text_digest(_type_of(value))


class CachedDigest:
    """Caches the `text_digest` of a plain value that nobody changes in place and that seldom differs between calls."""

    def __init__(self, digest_of: Callable[[object], int] = text_digest) -> None:
        self._digest_of = digest_of
        self._value: object = self
        self._digest = 0

    def digest(self, value: object) -> int:
        if value != self._value:
            self._value, self._digest = value, self._digest_of(value)
        return self._digest


class CachedNestDigest(CachedDigest):
    """Caches the `lenient_digest` of a nest, unless a part of it can change in place."""

    def __init__(self) -> None:
        super().__init__(lenient_digest)

    def digest(self, value: object) -> int:
        return super().digest(value) if _is_fixed(value) else lenient_digest(value)


def _is_fixed(value: object, depth: int = 0) -> bool:
    if type(value) in _AS_THEY_ARE:
        return True
    if type(value) is tuple or (depth < _OWN and type(value) is list):
        return all(_is_fixed(item, depth + 1) for item in value)
    return depth < _OWN and type(value) is dict and all(_is_fixed(item, depth + 1) for item in value.values())


def learning_rate_of(group: Mapping[str, Any], absent: float) -> float:
    """The learning rate of a parameter group; `absent` if it has none, or not one number, as Adafactor's own."""
    try:
        return float(group.get("lr", absent))
    except (TypeError, ValueError, RuntimeError):
        return absent


def state_digest(state: Mapping[str, object]) -> int:
    """The digest of an optimizer's state of one parameter, or of any small nest of tensors and values."""
    tensors: list[Tensor] = []
    rest: list[object] = []
    state_tensors(state, tensors, rest)
    found = {str(index): tensor_digest(plain(tensor)) for index, tensor in enumerate(tensors)}
    shapes = [(tuple(t.shape), str(t.dtype)) for t in tensors]
    return join(found | {"values": text_digest(_form(rest, []), shapes)})


def state_tensors(state: object, into: list[Tensor], rest: list[object]) -> None:
    """Sort an optimizer's state of one parameter into tensors and other values, in an order that every process has."""
    if isinstance(state, Tensor):
        into.append(state)
    elif isinstance(state, Mapping):
        for name in sorted(state, key=repr):
            rest.append(name)
            state_tensors(state[name], into, rest)
    elif isinstance(state, list | tuple):
        rest.append(len(state))
        for item in state:
            state_tensors(item, into, rest)
    elif not callable(state):
        rest.append(state)


def _form(value: Any, foreign: list[object]) -> object:
    """A nest of plain values with a `repr` of all that is in `value`. The tuples in it are ours, with a first item that
    names the type. A value of an unknown type is appended to `foreign`, and has the form of its type."""
    if type(value) in _AS_THEY_ARE:
        return value
    if isinstance(value, Tensor) and not value.is_meta:
        found = plain(value).cpu().resolve_conj().resolve_neg().contiguous()
        content = ctypes.string_at(found.data_ptr(), found.nbytes) if found.nbytes else b""
        return "tensor", str(value.dtype), tuple(value.shape), _hash(content)
    if _is_array(value):
        # An array of objects holds addresses, so each item is looked at.
        inside = _form(value.tolist(), foreign) if value.dtype.hasobject else _hash(value.tobytes())
        return "array", str(value.dtype), tuple(value.shape), inside
    if isinstance(value, enum.Enum):
        return "enum", type(value).__qualname__, value.name
    if isinstance(value, _BY_REPR):
        return type(value).__name__, repr(value)
    if isinstance(value, type):
        return "type", value.__module__, value.__qualname__
    if isinstance(value, Mapping):
        return "mapping", sorted([(_form(key, foreign), _form(item, foreign)) for key, item in value.items()], key=repr)
    if isinstance(value, Set):
        return "set", sorted([_form(item, foreign) for item in value], key=repr)
    if isinstance(value, Sequence):
        return [_form(item, foreign) for item in value]
    if dataclasses.is_dataclass(value):
        named = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
        return type(value).__qualname__, [(name, _form(item, foreign)) for name, item in named]
    foreign.append(value)
    return _type_of(value)


def _is_array(value: object) -> bool:
    return type(value).__module__ == "numpy" and hasattr(value, "tobytes")


def _type_of(value: object) -> tuple[str, str]:
    return "of type", f"{type(value).__module__}.{type(value).__qualname__}"


def _hash(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def _place(value: Any) -> str:
    """The path to the first foreign value in `value`, which has one: a chain of [0], .name or ['key']."""
    if _is_array(value):
        value = value.tolist()
    parts: list[tuple[str, Any]] = []
    if isinstance(value, Mapping):
        parts = [part for key, item in value.items() for part in (("'s keys", key), (f"[{key!r}]", item))]
    elif isinstance(value, Set):
        parts = [("'s items", item) for item in value]
    elif isinstance(value, Sequence):
        parts = [(f"[{index}]", item) for index, item in enumerate(value)]
    elif dataclasses.is_dataclass(value):
        parts = [(f".{field.name}", getattr(value, field.name)) for field in dataclasses.fields(value)]
    for place, part in parts:
        foreign: list[object] = []
        _form(part, foreign)
        if foreign:
            return place + _place(part)
    return ""
