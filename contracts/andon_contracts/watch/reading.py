"""Cheap reading of many tensors at once: their bits as a few flat chunks, and one digest of those.

A loop has hundreds of small tensors, and looking at each costs more than reading them. So tensors of one kind are
copied together into chunks, and a chunk is looked at as one. Names, shapes and order are bound by a digest of the
layout, which is compared as well.
"""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor

from andon_contracts.digest import join, mix_integer, tensor_digest, word_sum_tensor
from andon_contracts.watch.checksum import checksum

CHUNK_BYTES = 1 << 24
_CPU_BYTES = 1 << 22
"""So much is copied and looked at together: on a CPU, so that most of it is still in a cache."""
_SMALL_BYTES = 1 << 18
ORDINARY = (Tensor, torch.nn.Parameter)
"""Types of tensors that are what they hold, unless they are sparse."""
_dtype_of = attrgetter("dtype")


def plain(tensor: Tensor) -> Tensor:
    """The dense tensor of this rank behind `tensor`: the local part of a distributed, the values of a sparse one."""
    local = getattr(tensor, "to_local", None)
    found: Tensor = local() if local is not None else tensor
    found = found.detach()
    return found if found.layout == torch.strided else found.coalesce().values()


def chunks(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """The elements of `tensors` in order as 1-dim tensors; small neighbours of one kind are copied together.

    A large tensor that is contiguous is passed on as it is: the chunks are to be read, not kept.
    """
    small: list[Tensor] = []
    kind: Hashable = None
    size = 0
    for tensor in map(plain, tensors):
        bytes_ = tensor.numel() * tensor.element_size()
        mine = (tensor.dtype, tensor.device)
        if small and (mine != kind or size + bytes_ > CHUNK_BYTES or bytes_ > _SMALL_BYTES):
            yield torch.cat(small) if len(small) > 1 else small[0]
            small, size = [], 0
        if bytes_ > _SMALL_BYTES:
            yield tensor.reshape(-1)
            continue
        small.append(tensor.reshape(-1))
        kind, size = mine, size + bytes_
    if small:
        yield torch.cat(small) if len(small) > 1 else small[0]


def norm_of_chunks(parts: Sequence[Tensor]) -> float:
    """The 2-norm of all elements; in fp32 as torch's clipping computes it, so that it overflows where that does."""
    if not parts:
        return 0.0
    return _joined([_norm(part) for part in parts])


def _norm(part: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(part.float() if part.element_size() < 4 else part)
    return norm


def _joined(norms: Sequence[Tensor]) -> float:
    if len(norms) <= 1:
        return float(norms[0]) if norms else 0.0
    return float(torch.linalg.vector_norm(torch.stack([norm.to(norms[0]) for norm in norms])))


@dataclass(frozen=True)
class Reading:
    """What one look at some tensors gave: a digest in [0, 2^64) of their bits in order, and their 2-norm."""

    digest: int
    norm: float


class Reader:
    """Looks at one list of tensors again and again; what was found of its layout is kept while the dtypes stay.

    The digest binds bits and order; names and shapes are to be compared apart. It is one on all CPUs, and one on all
    other devices; `portable` digests are one everywhere, and on a CPU several times slower.
    """

    def __init__(self, *, portable: bool = False) -> None:
        self.portable = portable
        self._dtypes: list[torch.dtype] | None = None
        self._groups: list[list[int]] = []
        self._special = False

    def read(self, tensors: Sequence[Tensor], *, norm: bool = False) -> Reading:
        """The digest of `tensors`, and where asked their norm as `norm_of_chunks` has it (0.0 where not)."""
        dtypes = list(map(_dtype_of, tensors))
        known = dtypes == self._dtypes
        if not known:
            self._plan(tensors, dtypes)
        try:
            return self._look(tensors, norm=norm)
        except RuntimeError:
            # Other devices, layouts or kinds of tensors under the dtypes of before.
            if not known:
                raise
        self._plan(tensors, dtypes)
        return self._look(tensors, norm=norm)

    def _plan(self, tensors: Sequence[Tensor], dtypes: list[torch.dtype]) -> None:
        """Which tensors are copied together: small ones of one dtype and device; a large one stays alone."""
        self._dtypes = dtypes
        self._special = any(type(t) not in ORDINARY or t.layout != torch.strided for t in tensors)
        self._groups = []
        open_: dict[Hashable, tuple[list[int], int]] = {}
        for index, tensor in enumerate(map(plain, tensors)):
            size = tensor.numel() * tensor.element_size()
            kind = (tensor.dtype, tensor.device)
            group, filled = open_.get(kind, ([], 0))
            most = _CPU_BYTES if tensor.device.type == "cpu" else CHUNK_BYTES
            if not group or size > _SMALL_BYTES or filled + size > most:
                group, filled = [], 0
                self._groups.append(group)
            group.append(index)
            if size <= _SMALL_BYTES:
                open_[kind] = (group, filled + size)

    def _look(self, tensors: Sequence[Tensor], *, norm: bool) -> Reading:
        if self._special:
            tensors = [plain(tensor) for tensor in tensors]
        sums: list[int | Tensor] = []
        norms: list[Tensor] = []
        with torch.no_grad():
            for group in self._groups:
                part = _together([tensors[index] for index in group])
                on_cpu = part.device.type == "cpu" and not self.portable
                sums.append(checksum(part) if on_cpu else word_sum_tensor(part))
                if norm:
                    norms.append(_norm(part))
        total = len(tensors)
        for each in sums:
            total = _chained(total, each)
        return Reading(total, _joined(norms))


def _together(tensors: Sequence[Tensor]) -> Tensor:
    if len(tensors) == 1:
        return tensors[0].detach().resolve_conj().resolve_neg().reshape(-1)
    flat: Tensor = torch._utils._flatten_dense_tensors(tensors)  # type: ignore[no-untyped-call]
    return flat


def _chained(total: int, value: int | Tensor) -> int:
    return mix_integer(total + int(value))


def flat_digest(tensors: Iterable[Tensor]) -> int:
    """One digest in [0, 2^64) of the bits of `tensors` in order, as a `Reader` gives it."""
    return Reader().read(list(tensors)).digest


def text_digest(*parts: object) -> int:
    """A digest in [0, 2^62) of plain values that have a stable `repr`."""
    data = repr(parts).encode("utf-8", "backslashreplace")
    return zlib.crc32(data) << 30 ^ zlib.adler32(data)


class Text:
    """The `text_digest` of a value that seldom is another than before."""

    def __init__(self) -> None:
        self._value: object = self
        self._digest = 0

    def digest(self, value: object) -> int:
        """The digest of `value`, which nobody may change afterwards."""
        if value != self._value:
            self._value, self._digest = value, text_digest(value)
        return self._digest


def layout_digest(tensors: Mapping[str, Tensor]) -> int:
    """The digest of names, shapes and dtypes in order."""
    return text_digest([(name, tuple(t.shape), str(t.dtype)) for name, t in tensors.items()])


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


def state_digest(state: Mapping[str, object]) -> int:
    """The digest of what an optimizer keeps for one parameter, or of any small nest of tensors and values."""
    tensors: list[Tensor] = []
    rest: list[object] = []
    state_tensors(state, tensors, rest)
    found = {str(index): tensor_digest(plain(tensor)) for index, tensor in enumerate(tensors)}
    return join(found | {"values": text_digest(rest, [(tuple(t.shape), str(t.dtype)) for t in tensors])})
