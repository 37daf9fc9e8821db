"""Cheap reading of many tensors at once: their bits as a few flat chunks, and one digest of those.

A loop has hundreds of small tensors, and looking at each costs more than reading them. So tensors of one kind are
copied together into chunks, and a chunk is looked at as one. Names, shapes and order are bound by a digest of the
layout, which is compared as well.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from operator import attrgetter

import torch
from torch import Tensor

from andon_contracts.digest import mix_integer, word_sum_tensor
from andon_contracts.watch.checksum import MOST_SUMS, Summed, checksum, room_of, sums_of

CHUNK_BYTES = 1 << 24
_CPU_BYTES = 1 << 19
"""So much is copied and looked at together: on a CPU, so that it is still in a cache."""
_SMALL_BYTES = 1 << 18
_WORD = 8
ORDINARY = (Tensor, torch.nn.Parameter)
"""Types of tensors that are what they hold, unless they are sparse."""
_dtype_of = attrgetter("dtype")
_unrecorded: Callable[[], AbstractContextManager[None]] = getattr(torch._C, "_AutoDispatchBelowAutograd", torch.no_grad)
"""As `no_grad`, but autograd is not even asked, which for many small tensors takes as long as reading them."""


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
    """Looks at one list of tensors again and again; what was found of its layout is kept while that stays.

    The digest binds bits and order; names and shapes are to be compared apart. It is one on all CPUs, and one on all
    other devices; `portable` digests are one everywhere, and on a CPU several times slower.
    """

    def __init__(self, *, portable: bool = False, stable: bool = False) -> None:
        """stable: the tensors are mostly the same ones in the same memory, as weights are and gradients are not."""
        self.portable = portable
        self._stable = stable
        self._layout: list[object] = []
        self._places: list[int] = []
        self._held: Sequence[Tensor] = ()
        self._groups: list[_Group] = []
        self._summed: list[Summed] = []
        self._special = False
        self._copied = False

    def read(self, tensors: Sequence[Tensor], *, norm: bool = False) -> Reading:
        """The digest of `tensors`, and where asked their norm as `norm_of_chunks` has it (0.0 where not)."""
        try:
            return self._read(tensors, norm=norm)
        except RuntimeError:
            # Other devices or kinds of tensors under the dtypes and sizes of before; or what comes up again.
            self._layout = []
            return self._read(tensors, norm=norm, anew=True)

    def _read(self, tensors: Sequence[Tensor], *, norm: bool, anew: bool = False) -> Reading:
        if anew or not self._stable or self._copied or self._moved(tensors):
            layout = [*map(_dtype_of, tensors), *map(Tensor.numel, tensors)]
            if layout != self._layout:
                with torch.no_grad():
                    self._plan(tensors, layout)
            with torch.no_grad() if self._special else _unrecorded():
                self._fill(tensors)
        with _unrecorded():
            return self._look(norm=norm)

    def _moved(self, tensors: Sequence[Tensor]) -> bool:
        """Whether one of `tensors` is another one than before, or in other memory."""
        places = [*map(Tensor.data_ptr, tensors), *map(Tensor.numel, tensors)]
        if tensors is not self._held or not isinstance(tensors, tuple):
            places += map(id, tensors)
        moved = places != self._places
        # While they are held, nothing else can have their identities.
        self._places, self._held = places, tensors
        return moved

    def _fill(self, tensors: Sequence[Tensor]) -> None:
        # What is not contiguous is copied where it is made flat: such a copy must not be kept.
        self._copied = self._special or not all(map(Tensor.is_contiguous, tensors))
        if self._special:
            tensors = [plain(tensor).resolve_conj().resolve_neg() for tensor in tensors]
        for group in self._groups:
            members = [tensors[index] for index in group.members]
            group.flat = [*(members if group.places else [member.flatten() for member in members]), *group.filler]

    def _plan(self, tensors: Sequence[Tensor], layout: list[object]) -> None:
        """Which tensors are copied together: small ones of one dtype and device; a large one stays alone."""
        self._layout = layout
        self._places = []
        self._special = any(type(t) not in ORDINARY or t.layout != torch.strided or t.is_complex() for t in tensors)
        self._groups = []
        open_: dict[Hashable, _Group] = {}
        for index, tensor in enumerate(map(plain, tensors)):
            size = tensor.numel() * tensor.element_size()
            kind = (tensor.dtype, tensor.device)
            most = _CPU_BYTES if tensor.device.type == "cpu" else CHUNK_BYTES
            group = open_.get(kind)
            if group is None or size > _SMALL_BYTES or group.size + size > most:
                group = _Group()
                self._groups.append(group)
                if size <= _SMALL_BYTES:
                    open_[kind] = group
            group.members.append(index)
            group.size += size
        self._sum_copies(tensors)

    def _sum_copies(self, tensors: Sequence[Tensor]) -> None:
        """Where groups are copied on a CPU: into which room, and with which others each is summed."""
        batches: list[list[_Group]] = []
        most = 0
        for group in self._groups:
            first = tensors[group.members[0]]
            if len(group.members) > 1 and first.device.type == "cpu" and first.itemsize <= _WORD:
                group.copy_into(_scratch(), first.dtype)
                if not (self._stable or self._special):
                    group.place([plain(tensors[index]) for index in group.members])
                most += sums_of(group.size)
                if not batches or most > MOST_SUMS:
                    batches.append([])
                    most = sums_of(group.size)
                batches[-1].append(group)
        self._summed = [Summed([group.size for group in batch], _scratch()) for batch in batches]
        for batch, summed in zip(batches, self._summed, strict=True):
            for piece, group in enumerate(batch):
                group.take = functools.partial(summed.take, piece)

    def _look(self, *, norm: bool) -> Reading:
        alone: list[int | Tensor] = []
        norms: list[Tensor] = []
        count = 0
        for group in self._groups:
            count += len(group.members)
            part = group.together()
            if self.portable or part.device.type != "cpu":
                alone.append(word_sum_tensor(part))
            elif group.take is None:
                alone.append(checksum(part))
            else:
                group.take()
            if norm:
                norms.append(_norm(part))
        together = [] if self.portable else [summed.fold() for summed in self._summed]
        found = Reading(chained(count, [*together, *alone]), _joined(norms))
        if not self._stable:
            for group in self._groups:
                group.flat = []
        return found


@dataclass
class _Group:
    """Tensors that are looked at as one, by their places in the list; `size` in bytes; `flat` what is looked at."""

    members: list[int] = field(default_factory=list)
    size: int = 0
    flat: list[Tensor] = field(default_factory=list)
    filler: list[Tensor] = field(default_factory=list)
    """The zeros that are copied behind the others, to whole rows and lines."""
    places: list[Tensor] = field(default_factory=list)
    """Where in the room each one is copied to, where they are not made flat first."""
    room: Tensor | None = None
    copied: Tensor | None = None
    """The room without the zeros."""
    take: Callable[[], None] | None = None
    """Sums what is in the room, where that is of a CPU."""

    def copy_into(self, words: Tensor, dtype: torch.dtype) -> None:
        """Let `together` copy tensors of `dtype` into `words`, with zeros behind them."""
        self.room = words[: room_of(self.size)].view(dtype)
        self.copied = self.room[: self.size // dtype.itemsize]
        self.filler = [torch.zeros(self.room.numel() - self.copied.numel(), dtype=dtype)]

    def place(self, members: Sequence[Tensor]) -> None:
        """Let `together` copy tensors of the shapes of `members` as they are: tensors that are new each time would have
        to be made flat each time.
        """
        assert self.room is not None
        sizes = [*map(Tensor.numel, members), *map(Tensor.numel, self.filler)]
        parts = zip(torch.split(self.room, sizes), [*members, *self.filler], strict=True)
        self.places = [part.view(member.shape) for part, member in parts]

    def together(self) -> Tensor:
        """All elements as one 1-dim tensor, to be read before the next group is."""
        if self.copied is not None and self.places:
            torch._foreach_copy_(self.places, self.flat)
            return self.copied
        if self.copied is not None:
            torch.cat(self.flat, out=self.room)
            return self.copied
        return self.flat[0].detach() if len(self.flat) == 1 else torch.cat(self.flat)


@functools.lru_cache(maxsize=1)
def _scratch() -> Tensor:
    """Memory of a CPU for what is copied together. A new piece for each copy would cost more than the copy."""
    return torch.empty(room_of(_CPU_BYTES), dtype=torch.int64)


def chained(digest: int, following: Iterable[int | Tensor]) -> int:
    """One digest in [0, 2^64) of `digest` and those `following`, in their order."""
    for value in following:
        digest = mix_integer(digest + int(value))
    return digest


def flat_digest(tensors: Iterable[Tensor]) -> int:
    """One digest in [0, 2^64) of the bits of `tensors` in order, as a `Reader` gives it."""
    return Reader().read(list(tensors)).digest


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
