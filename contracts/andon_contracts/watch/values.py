"""One digest of any nest of tensors, arrays and plain values, by all that is in it and nothing that is chance.

Not by their `repr`: that leaves out most of a large tensor or array, orders a set by the hash seed of its process, and
shows the address of an object that has none of its own.
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
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import torch

from andon_contracts.watch.reading import plain, text_digest

_AS_THEY_ARE = frozenset({type(None), bool, int, float, complex, str, bytes})
_BY_REPR = (
    int, float, str, bytes, bytearray, range, slice, type(...), datetime.date, datetime.time, datetime.timedelta,
    decimal.Decimal, fractions.Fraction, uuid.UUID, pathlib.PurePath,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
"""Types whose `repr` says all of a value, and the same in every process."""
_BYTES = 8


class _Foreign(Exception):
    """A value of a type that is not known; `path` leads to it."""

    def __init__(self, value: object) -> None:
        super().__init__()
        self.value = value
        self.path = ""


def value_digest(value: object, name: str) -> int:
    """A digest in [0, 2^62) of `value`, equal in every process for equal values; name: what to call `value`.

    The order of a mapping and of a set has no part in it. A list and a tuple of the same items have one digest; a
    tensor and an array of the same numbers have two. Raises `ValueError` for what is no tensor, array, dataclass,
    mapping, sequence, set or plain value, with its place in `value`.
    """
    try:
        return text_digest(_form(value))
    except _Foreign as error:
        kind = f"{type(error.value).__module__}.{type(error.value).__qualname__}"
        msg = f"{name}{error.path} is a {kind}, which cannot be compared: give a tensor or plain values"
        raise ValueError(msg) from None


def _form(value: Any) -> object:
    """What has a `repr` of all that is in `value`; tuples in it are ours."""
    if type(value) in _AS_THEY_ARE:
        return value
    if isinstance(value, torch.Tensor):
        return _form_of_tensor(value)
    if type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
        return _form_of_array(value)
    if isinstance(value, enum.Enum):
        return "enum", type(value).__qualname__, value.name
    if isinstance(value, _BY_REPR):
        return type(value).__name__, repr(value)
    if isinstance(value, type):
        return "type", value.__module__, value.__qualname__
    return _form_of_nest(value)


def _form_of_tensor(tensor: torch.Tensor) -> object:
    if tensor.is_meta:
        raise _Foreign(tensor)
    found = plain(tensor).cpu().resolve_conj().resolve_neg().contiguous()
    content = ctypes.string_at(found.data_ptr(), found.nbytes) if found.nbytes else b""
    return "tensor", str(tensor.dtype), tuple(tensor.shape), _hash(content)


def _form_of_array(array: Any) -> object:
    dtype = array.dtype
    # An array of objects holds addresses; its items are looked at one by one.
    content = _form(array.tolist()) if dtype.hasobject else _hash(array.tobytes())
    return "array", str(dtype), tuple(array.shape), content


def _form_of_nest(value: Any) -> object:
    if isinstance(value, Mapping):
        pairs = [(_at("'s keys", key), _at(f"[{key!r}]", item)) for key, item in value.items()]
        return "mapping", sorted(pairs, key=repr)
    if isinstance(value, Set):
        return "set", sorted((_at("'s items", item) for item in value), key=repr)
    if isinstance(value, Sequence):
        return _forms(value)
    if dataclasses.is_dataclass(value):
        named = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
        return type(value).__qualname__, [(name, _at(f".{name}", item)) for name, item in named]
    raise _Foreign(value)


def _forms(items: Iterable[object]) -> list[object]:
    found: list[object] = []
    try:
        for item in items:
            found.append(_form(item))
    except _Foreign as error:
        error.path = f"[{len(found)}]{error.path}"
        raise
    return found


def _at(place: str, item: object) -> object:
    try:
        return _form(item)
    except _Foreign as error:
        error.path = place + error.path
        raise


def _hash(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=_BYTES).hexdigest()
