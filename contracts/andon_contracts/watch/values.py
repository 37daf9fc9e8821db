"""Digests of nested tensors, arrays and plain values: of their whole content, and equal in every process.

`repr` alone is not enough: it shortens a large tensor or array, orders a set by the hash seed of its process, and shows
the address of an object that does not define it.
"""

from __future__ import annotations

import ctypes
import dataclasses
import datetime
import decimal
import enum
import fractions
import hashlib
import operator
import pathlib
import uuid
import zlib
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from andon_contracts.digest import join, tensor_digest
from andon_contracts.observe import plain

_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})
_BY_REPR = (
    int, float, str, bytes, bytearray, range, slice, type(...), datetime.date, datetime.time, datetime.timedelta,
    decimal.Decimal, fractions.Fraction, uuid.UUID, pathlib.PurePath,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
"""Types whose `repr` shows the whole value, and is the same in every process."""


def text_digest(*parts: object) -> int:
    """A digest in [0, 2^62) of plain values that have a stable `repr`."""
    data = repr(parts).encode("utf-8", "backslashreplace")
    return zlib.crc32(data) << 30 ^ zlib.adler32(data)


def is_flattened(tensor: Tensor) -> bool:
    """Whether FSDP1 manages the parameter: its shape is that of this rank's part."""
    return bool(getattr(tensor, "_fsdp_flattened", False))


def layout_digest(tensors: Mapping[str, Tensor]) -> int:
    """The digest of names, shapes and dtypes in order."""
    shapes = {name: None if is_flattened(tensor) else tuple(tensor.shape) for name, tensor in tensors.items()}
    return text_digest([(name, shapes[name], str(t.dtype)) for name, t in tensors.items()])


def trainable_layout_digest(tensors: Mapping[str, Tensor]) -> int:
    """`layout_digest` and the `requires_grad` flags: a loop that reduces by hand uses the trained tensors in order."""
    return text_digest([(layout_digest(tensors), [t.requires_grad for t in tensors.values()])])


def value_digest(value: object, name: str) -> int:
    """A digest in [0, 2^62) of `value`, equal in every process for equal values. name: what an error calls `value`.

    The order of a mapping or set does not count. A list and a tuple of the same items have the same digest; a tensor
    and an array of the same numbers do not. Raises `ValueError`, with the place in `value`, for anything but tensors,
    arrays, dataclasses, mappings, sequences, sets and plain values.
    """
    unsupported: list[object] = []
    digest = text_digest(_form(value, unsupported))
    if unsupported:
        kind = _type_of(unsupported[0])[1]
        raise ValueError(f"{name}{_place(value)} is a {kind}, which cannot be compared: give a tensor or plain values")
    return digest


def ids_of(ids: Sequence[int] | Tensor) -> list[int]:
    """Convert row ids into integers. Accepts what Python accepts as an index: numpy's integers, one-element tensors.

    Raises `ValueError` unless `ids` is a flat sequence of integers from 0.
    """
    listed: Iterable[Any] = ids.tolist() if isinstance(ids, Tensor) else ids
    listed = list(listed)
    try:
        rows = [operator.index(each) for each in listed]
    except TypeError:
        rows = [-1]
    # Torch and Python would count a truth value as 1 or 0.
    truths = (isinstance(each, bool) or getattr(each, "dtype", None) is torch.bool for each in listed)
    if any(row < 0 for row in rows) or any(truths):
        raise ValueError(f"ids must be a flat sequence of integers from 0, not {str(listed)[:80]}")
    return rows


def contents_of(content: Sequence[object], count: int) -> list[int]:
    """One digest for each row of `content`.

    Raises `ValueError` if its length is not `count`, or if a row holds a value that cannot be compared.
    """
    if len(content) != count:
        raise ValueError(f"content has {len(content)} rows, ids has {count}")
    return [value_digest(row, f"content[{index}]") for index, row in enumerate(content)]


def lenient_digest(value: object) -> int:
    """`value_digest`, but a part that cannot be compared, such as a function, is digested by its type."""
    try:
        return text_digest(_form(value, []))
    except RecursionError:  # it may contain itself
        return text_digest(_type_of(value))


def learning_rate_of(group: Mapping[str, Any], absent: float) -> float:
    """The learning rate of a parameter group; `absent` if it has none, or several, as Adafactor's."""
    try:
        return float(group.get("lr", absent))
    except (TypeError, ValueError, RuntimeError):
        return absent


def state_digest(state: Mapping[str, object]) -> int:
    """The digest of an optimizer's state of one parameter, or of any small nest of tensors and values."""
    tensors: list[Tensor] = []
    rest: list[object] = []
    state_tensors(state, tensors, rest)
    digests = {str(index): tensor_digest(plain(tensor)) for index, tensor in enumerate(tensors)}
    return join(digests | {"values": text_digest(_form(rest, []), [(tuple(t.shape), str(t.dtype)) for t in tensors])})


def state_tensors(state: object, into: list[Tensor], rest: list[object]) -> None:
    """Split an optimizer's state of one parameter into tensors and other values, in the same order in every process."""
    if isinstance(state, Tensor):
        into.append(state)
    elif isinstance(state, Mapping):
        for name in sorted(state, key=repr):
            rest.append(name)
            value = state[name]
            into.append(value) if isinstance(value, Tensor) else state_tensors(value, into, rest)
    elif isinstance(state, list | tuple):
        rest.append(len(state))
        for item in state:
            state_tensors(item, into, rest)
    elif not callable(state):
        rest.append(state)


def _form(value: Any, unsupported: list[object]) -> object:
    """A nest of plain values whose `repr` shows the whole `value`: each type becomes a tuple that begins with its name.

    A value of an unknown type is appended to `unsupported`, and its type stands for it.
    """
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Tensor) and not value.is_meta:
        tensor = plain(value).cpu().resolve_conj().resolve_neg().contiguous()
        content = ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.nbytes else b""
        return "tensor", str(value.dtype), tuple(value.shape), _hash(content)
    if _is_array(value):
        # An array of objects holds addresses, so its items are read one by one.
        items = _form(value.tolist(), unsupported) if value.dtype.hasobject else _hash(value.tobytes())
        return "array", str(value.dtype), tuple(value.shape), items
    if isinstance(value, enum.Enum):
        return "enum", type(value).__qualname__, value.name
    if isinstance(value, _BY_REPR):
        return type(value).__name__, repr(value)
    if isinstance(value, type):
        return "type", value.__module__, value.__qualname__
    if isinstance(value, Mapping):
        pairs = [(_form(key, unsupported), _form(item, unsupported)) for key, item in value.items()]
        return "mapping", sorted(pairs, key=repr)
    if isinstance(value, Set):
        return "set", sorted([_form(item, unsupported) for item in value], key=repr)
    if isinstance(value, Sequence):
        return [item if type(item) in _PLAIN else _form(item, unsupported) for item in value]
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return type(value).__qualname__, [(name, _form(getattr(value, name), unsupported)) for name in names]
    unsupported.append(value)
    return _type_of(value)


def _is_array(value: object) -> bool:
    return type(value).__module__ == "numpy" and hasattr(value, "tobytes")


def _type_of(value: object) -> tuple[str, str]:
    return "of type", f"{type(value).__module__}.{type(value).__qualname__}"


def _hash(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def _place(value: Any) -> str:
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
        unsupported: list[object] = []
        _form(part, unsupported)
        if unsupported:
            return place + _place(part)
    return ""
