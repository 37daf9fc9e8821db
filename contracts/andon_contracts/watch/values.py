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
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
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
_BYTES = 8
_OWN = 3
_Unknown = Callable[[object], object]


class _Foreign(Exception):
    """A value of a type that is not known; `path` leads to it."""

    def __init__(self, value: object) -> None:
        super().__init__()
        self.value = value
        self.path = ""


def text_digest(*parts: object) -> int:
    """A digest in [0, 2^62) of plain values that have a stable `repr`."""
    data = repr(parts).encode("utf-8", "backslashreplace")
    return zlib.crc32(data) << 30 ^ zlib.adler32(data)


class Text:
    """The `text_digest` of a plain value, which nobody can change, and that seldom is another than before."""

    def __init__(self) -> None:
        self._value: object = self
        self._digest = 0

    def digest(self, value: object) -> int:
        """The digest of `value`."""
        if value != self._value:
            self._value, self._digest = value, text_digest(value)
        return self._digest


def layout_digest(tensors: Mapping[str, Tensor]) -> int:
    """The digest of names, shapes and dtypes in order."""
    return text_digest([(name, tuple(t.shape), str(t.dtype)) for name, t in tensors.items()])


def roles_digest(tensors: Mapping[str, Tensor]) -> int:
    """As `layout_digest`, and of which are trained: a loop that reduces by hand takes the trained ones, one by one."""
    return text_digest([(layout_digest(tensors), [t.requires_grad for t in tensors.values()])])


def value_digest(value: object, name: str) -> int:
    """A digest in [0, 2^62) of `value`, equal in every process for equal values; name: what to call `value`.

    The order of a mapping and of a set has no part in it. A list and a tuple of the same items have one digest; a
    tensor and an array of the same numbers have two. Raises `ValueError` for what is no tensor, array, dataclass,
    mapping, sequence, set or plain value, with its place in `value`.
    """
    try:
        return text_digest(_form(value, _refused))
    except _Foreign as error:
        kind = f"{type(error.value).__module__}.{type(error.value).__qualname__}"
        msg = f"{name}{error.path} is a {kind}, which cannot be compared: give a tensor or plain values"
        raise ValueError(msg) from None


def kept_digest(value: object) -> int:
    """As `value_digest`, for what others keep: what cannot be compared, as a function, stands there by its type."""
    try:
        return text_digest(_form(value, _by_type))
    except RecursionError:  # it holds itself, say
        return text_digest(_by_type(value))


def rate_of(group: Mapping[str, Any], absent: float) -> float:
    """The learning rate of a parameter group; `absent` if it has none, or not one number, as Adafactor's own."""
    try:
        return float(group.get("lr", absent))
    except (TypeError, ValueError, RuntimeError):
        return absent


def state_digest(state: Mapping[str, object]) -> int:
    """The digest of what an optimizer keeps for one parameter, or of any small nest of tensors and values."""
    tensors: list[Tensor] = []
    rest: list[object] = []
    state_tensors(state, tensors, rest)
    found = {str(index): tensor_digest(plain(tensor)) for index, tensor in enumerate(tensors)}
    shapes = [(tuple(t.shape), str(t.dtype)) for t in tensors]
    return join(found | {"values": text_digest(_form(rest, _by_type), shapes)})


def state_tensors(state: object, into: list[Tensor], rest: list[object]) -> None:
    """Sort what an optimizer keeps for one parameter into tensors and other values, in an order that has no chance."""
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


class Nest:
    """The `kept_digest` of a nest that seldom is another than before; digested anew where parts of it can change."""

    def __init__(self) -> None:
        self._value: object = self
        self._digest = 0

    def digest(self, value: object) -> int:
        """The digest of `value`: lists and mappings of plain values, made anew each time, or of anything."""
        if not _is_fixed(value):
            return kept_digest(value)
        if value != self._value:
            self._value, self._digest = value, kept_digest(value)
        return self._digest


def _is_fixed(value: object, depth: int = 0) -> bool:
    """Whether nobody else can change `value`, of which the first three levels are the caller's own."""
    if type(value) in _AS_THEY_ARE:
        return True
    if type(value) is tuple or (depth < _OWN and type(value) is list):
        return all(_is_fixed(item, depth + 1) for item in value)
    return depth < _OWN and type(value) is dict and all(_is_fixed(item, depth + 1) for item in value.values())


def _refused(value: object) -> object:
    raise _Foreign(value)


def _by_type(value: object) -> object:
    return "of type", f"{type(value).__module__}.{type(value).__qualname__}"


def _form(value: Any, foreign: _Unknown) -> object:
    """What has a `repr` of all that is in `value`; tuples in it are ours. foreign: what stands for what has none."""
    if type(value) in _AS_THEY_ARE:
        return value
    if isinstance(value, Tensor):
        return _form_of_tensor(value, foreign)
    if type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
        return _form_of_array(value, foreign)
    if isinstance(value, enum.Enum):
        return "enum", type(value).__qualname__, value.name
    if isinstance(value, _BY_REPR):
        return type(value).__name__, repr(value)
    if isinstance(value, type):
        return "type", value.__module__, value.__qualname__
    return _form_of_nest(value, foreign)


def _form_of_tensor(tensor: Tensor, foreign: _Unknown) -> object:
    if tensor.is_meta:
        return foreign(tensor)
    found = plain(tensor).cpu().resolve_conj().resolve_neg().contiguous()
    content = ctypes.string_at(found.data_ptr(), found.nbytes) if found.nbytes else b""
    return "tensor", str(tensor.dtype), tuple(tensor.shape), _hash(content)


def _form_of_array(array: Any, foreign: _Unknown) -> object:
    dtype = array.dtype
    # An array of objects holds addresses; its items are looked at one by one.
    content = _form(array.tolist(), foreign) if dtype.hasobject else _hash(array.tobytes())
    return "array", str(dtype), tuple(array.shape), content


def _form_of_nest(value: Any, foreign: _Unknown) -> object:
    if isinstance(value, Mapping):
        pairs = [(_at("'s keys", key, foreign), _at(f"[{key!r}]", item, foreign)) for key, item in value.items()]
        return "mapping", sorted(pairs, key=repr)
    if isinstance(value, Set):
        return "set", sorted((_at("'s items", item, foreign) for item in value), key=repr)
    if isinstance(value, Sequence):
        return _forms(value, foreign)
    if dataclasses.is_dataclass(value):
        named = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
        return type(value).__qualname__, [(name, _at(f".{name}", item, foreign)) for name, item in named]
    return foreign(value)


def _forms(items: Iterable[object], foreign: _Unknown) -> list[object]:
    found: list[object] = []
    try:
        for item in items:
            found.append(_form(item, foreign))
    except _Foreign as error:
        error.path = f"[{len(found)}]{error.path}"
        raise
    return found


def _at(place: str, item: object, foreign: _Unknown) -> object:
    try:
        return _form(item, foreign)
    except _Foreign as error:
        error.path = place + error.path
        raise


def _hash(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=_BYTES).hexdigest()
