"""What is read of tensors: digests, norms, whether they are finite, their extremes. For the trainer and for a watch.

A look waits for nothing: what it finds stays on the device of the tensors, and whoever asks for a value as a number
waits for the device then. There are three ways to look.

`word_sums` is for flat memory, and gives an integer of each: the trainer keeps weights, gradient and moments flat, and
its gate compares the sums where they are. They are portable: one value on every device.

An `Observer` is for a list of hundreds of tensors, as a loop has them, and gives one digest for all. On a CPU it is
the checksum that is fastest there, unless it is to be `portable`, which takes several times as long on a CPU: only
where ranks on CPUs are compared with ranks on other devices. On a GPU it is always portable, and one launch.

`Extremes` are taken where gradients appear, on a GPU of many at once, and read together.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from operator import attrgetter

import torch
from torch import Tensor

from andon_contracts.checksum import MOST_SUMS, Summed, checksum, room_of, sums_in
from andon_contracts.digest import kernels, word_sum_tensor
from andon_contracts.multi_tensor import ListSums, RawGradients, bring, listable
from andon_contracts.norms import sum_of_squares

ORDINARY = (Tensor, torch.nn.Parameter)
"""Types of tensors that are what they hold, unless they are sparse."""
_CHUNK_BYTES = 1 << 24
_GROUP_BYTES = 1 << 19
"""So much is copied and looked at together: so that on a CPU it is still in a cache."""
_SMALL_BYTES = 1 << 18
_LEAST_BYTES, _MOST_SHARE = 1 << 25, 16
"""Raw gradients wait to be read until they are so many bytes, or one in so many of all, whichever is more."""
_WORD = 8
_MASK = (1 << 64) - 1
_NARROW = (torch.float32, torch.bfloat16, torch.float16)
_LONG = 1 << 17
"""Of more elements on a CPU, torch's own norm may be off by more than 5e-4 (`laws.loop.torch_norm_error`)."""
_WITH_VALUES = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_dtype_of, _device_of = attrgetter("dtype"), attrgetter("device")
_unrecorded: Callable[[], AbstractContextManager[None]] = getattr(torch._C, "_AutoDispatchBelowAutograd", torch.no_grad)
"""As `no_grad`, but autograd is not even asked, which for many small tensors takes as long as reading them."""


def plain(tensor: Tensor) -> Tensor:
    """The dense tensor of this rank behind `tensor`: the local part of a distributed, the values of a sparse one."""
    local = getattr(tensor, "to_local", None)
    found: Tensor = local() if local is not None else tensor
    found = found.detach()
    if found.layout == torch.strided and type(found) in ORDINARY and not (found.is_nested or found.is_quantized):
        return found
    parts = dense_parts(found)
    return parts[0] if len(parts) == 1 else torch.cat([p.contiguous().view(-1).view(torch.uint8) for p in parts])


def dense_parts(tensor: Tensor) -> list[Tensor]:
    """The dense tensors of this rank that hold what `tensor` does: itself, or those of which a wrapper is made.

    A wrapper is a subclass that has no memory of its own, as quantized weights and moments are.
    """
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    tensor = tensor.detach()
    if type(tensor) not in ORDINARY and hasattr(tensor, "__tensor_flatten__") and not tensor.is_nested:
        names, _ = tensor.__tensor_flatten__()
        return [part for name in names for part in dense_parts(getattr(tensor, name))]
    if tensor.layout == torch.sparse_coo:
        tensor = tensor.coalesce()
    if tensor.is_nested or tensor.layout in _WITH_VALUES:
        return [tensor.values().detach()]
    if tensor.is_quantized:
        return [tensor.int_repr()]
    return [tensor if tensor.layout == torch.strided else tensor.to_dense()]


def numbers(scalars: Sequence[Tensor]) -> list[float]:
    """The values of 0-dim tensors of one dtype, with one wait for each device."""
    if not scalars:
        return []
    if len(scalars) == 1:
        return [scalars[0].item()]  # a stack of one would be a launch more for nothing
    if len({scalar.device for scalar in scalars}) > 1:
        scalars = [scalar.cpu() for scalar in scalars]
    found: list[float] = torch.stack(list(scalars)).tolist()
    return found


def _local_parts(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """`tensors`, with the part of this rank in the place of each distributed one: itself, that is, and no alias."""
    distributed = {kind for kind in set(map(type, tensors)) if hasattr(kind, "to_local")}
    if not distributed:
        return tensors
    with torch.no_grad():  # with a graph it would be another tensor each time
        return tuple(t.to_local() if type(t) in distributed else t for t in tensors)  # type: ignore[attr-defined]


# Flat memory: one integer of each.


def word_sums(flats: Sequence[Tensor], *, finite: bool) -> Tensor:
    """int64 [n] on the tensors' device: the word sum of each of `flats`, of one size each. No wait for the device.

    finite: behind the sum of the first stands a number that is not 0 where an element of it is NaN or Inf. Up to three
    fp32 vectors on a GPU are read in one launch.
    """
    there = kernels() if flats[0].is_cuda and all(map(_one_pass, flats)) else None
    if there is not None:
        found = there.word_sums_and_nonfinite([flat.detach().view(torch.int64) for flat in flats])
        return torch.cat([found[0], found[1:, 0]]) if finite else found[:, 0]
    sums = [word_sum_tensor(flat) for flat in flats]
    if finite:
        sums.insert(1, nonfinite(flats[0]).to(torch.int64))
    return torch.stack(sums)


def _one_pass(tensor: Tensor) -> bool:
    """Whether the kernel can read `tensor`: fp32, in whole and aligned words."""
    return (
        tensor.dtype == torch.float32
        and tensor.is_contiguous()
        and tensor.numel() > 0
        and tensor.numel() % 2 == 0
        and tensor.data_ptr() % _WORD == 0
        and tensor.storage_offset() % 2 == 0
    )


def finite_total(tensor: Tensor) -> Tensor:
    """0-dim fp64 on the device of `tensor` (fp32 or less): finite exactly where every element is. No wait for it."""
    # What is not finite stays so in any sum, and in fp64 finite fp32 cannot overflow it. A CPU is slow at a sum in
    # fp64 of fp32 (each element is converted), so there the elements are looked at if their own sum is not finite.
    if tensor.device.type != "cpu":
        return tensor.sum(dtype=torch.float64)
    total = tensor.sum().double()
    if not math.isfinite(float(total)) and bool(torch.isfinite(tensor).all()):
        total.zero_()
    return total


def nonfinite(tensor: Tensor) -> Tensor:
    """0-dim bool on the tensor's device: whether any element is NaN or Inf. No wait for the device."""
    if tensor.dtype in _NARROW:
        return torch.isfinite(finite_total(tensor)).logical_not()
    return torch.isfinite(tensor).all().logical_not()


# Many tensors: one digest of all.


@dataclass(slots=True)
class Look:
    """What one look at a list of tensors found, where they are. To ask for `digest` or `norm` waits for the device,
    unless `waiting` and `norms` were brought to the CPU before.
    """

    count: int
    beside: int
    sums: list[int | tuple[int, int]]
    """In order: numbers where a CPU found them, else which of those `waiting` has it, and at which place."""
    waiting: list[Tensor]
    """1-dim int64 on a device."""
    norms: list[Tensor]

    @property
    def digest(self) -> int:
        """The digest in [0, 2^64) of the tensors' bits in order, with what stood `beside` them."""
        bring(self.waiting)
        found = [each.tolist() for each in self.waiting]
        sums = [each if isinstance(each, int) else found[each[0]][each[1]] for each in self.sums]
        return (chained(self.count, sums) + self.beside) % (1 << 64)

    @property
    def norm(self) -> float:
        """The 2-norm of all elements, as `norm_of` gives it; 0.0 where it was not asked for."""
        return _joined(self.norms)


class Observer:
    """Looks at one list of tensors again and again; what was found of its layout is kept while that stays.

    The digest binds bits and order; names and shapes are to be compared apart. It is one on all CPUs; `portable` ones,
    as all other devices give them, are one everywhere.
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
        self._listed: list[_Listed] = []
        self._special = False
        self._copied = False

    def look(self, tensors: Sequence[Tensor], *, norm: bool = False, beside: int = 0) -> Look:
        """What is found of the bits of `tensors` now; norm: of their norm too. No wait for a device.

        beside: a digest in [0, 2^64) of what else is known of them, which becomes a part of theirs.
        """
        tensors = _local_parts(tensors)
        try:
            return self._look(tensors, norm, beside)
        except RuntimeError:
            # Other devices or kinds of tensors under the dtypes and sizes of before; or what comes up again.
            self._layout, self._groups = [], []
            return self._look(tensors, norm, beside, anew=True)

    def _look(self, tensors: Sequence[Tensor], norm: bool, beside: int, *, anew: bool = False) -> Look:
        if anew or not self._stable or self._copied or self._moved(tensors):
            layout = [*map(_dtype_of, tensors), *map(Tensor.numel, tensors), *map(_device_of, tensors)]
            if layout != self._layout:
                with torch.no_grad():
                    self._plan(tensors, layout)
            # An operator of a sparse or a distributed tensor is found through autograd's keys.
            with torch.no_grad() if self._special else _unrecorded():
                self._fill(tensors)
        with _unrecorded():
            return self._read(len(tensors), norm, beside)

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
        self._copied = self._special or (self._stable and not all(map(Tensor.is_contiguous, tensors)))
        if self._copied:
            self._places = []  # of a look before this one, which must not be taken for the last
        if self._special:
            tensors = [plain(tensor).resolve_conj().resolve_neg() for tensor in tensors]
        for group in self._groups:
            members = [tensors[index] for index in group.members]
            if group.in_place:
                group.flat = [member.contiguous() for member in members]
                continue
            group.flat = [*(members if group.places else [member.flatten() for member in members]), *group.filler]

    def _plan(self, tensors: Sequence[Tensor], layout: list[object]) -> None:
        """Which tensors are copied together: small ones of one dtype and device; a large one stays alone."""
        self._layout = layout
        self._special = any(type(t) not in ORDINARY or t.layout != torch.strided or t.is_complex() for t in tensors)
        self._groups = []
        open_: dict[Hashable, _Group] = {}
        for index, tensor in enumerate(map(plain, tensors)):
            size = tensor.numel() * tensor.element_size()
            kind = (tensor.dtype, tensor.device)
            group = open_.get(kind)
            if group is None or size > _SMALL_BYTES or group.size + size > _GROUP_BYTES:
                group = _Group(tensor.device)
                self._groups.append(group)
                if size <= _SMALL_BYTES:
                    open_[kind] = group
            group.members.append(index)
            group.sizes.append(size)
            group.size += size
        self._sum_copies(tensors)
        self._listed = []
        for device in filter(listable, dict.fromkeys(group.device for group in self._groups)):
            groups = [group for group in self._groups if group.device == device]
            self._listed.append(_Listed(len(self._listed), groups))

    def _sum_copies(self, tensors: Sequence[Tensor]) -> None:
        """Where groups are copied on a CPU: into which room, and with which others each is summed."""
        batches: list[list[_Group]] = []
        most = 0
        for group in self._groups:
            first = plain(tensors[group.members[0]])
            if len(group.members) > 1 and group.on_cpu and first.itemsize <= _WORD:
                group.copy_into(_scratch(), first.dtype)
                if not (self._stable or self._special):
                    group.place([plain(tensors[index]) for index in group.members])
                most += sums_in(group.size)
                if not batches or most > MOST_SUMS:
                    batches.append([])
                    most = sums_in(group.size)
                batches[-1].append(group)
        self._summed = [Summed([group.size for group in batch], _scratch()) for batch in batches]
        for batch, summed in zip(batches, self._summed, strict=True):
            for piece, group in enumerate(batch):
                group.take = functools.partial(summed.take, piece)

    def _read(self, count: int, norm: bool, beside: int) -> Look:
        waiting = [listed.look() for listed in self._listed]
        norms = [each for listed in self._listed for each in listed.norms()] if norm else []
        alone: list[int | tuple[int, int]] = []
        for group in self._groups:
            if group.source is not None:
                alone.append(group.source)
            else:
                part = group.together()
                if not group.on_cpu:
                    alone.append((len(waiting), 0))
                    waiting.append(word_sum_tensor(part).view(1))
                elif self.portable:
                    alone.append(int(word_sum_tensor(part)))
                elif group.take is None:
                    alone.append(checksum(part))
                else:
                    group.take()
                if norm:
                    norms.append(_norm(part))
            if not self._stable:
                group.flat = []
        together = [] if self.portable else [summed.fold() for summed in self._summed]
        return Look(count, beside, [*together, *alone], waiting, _fewer(norms))


@dataclass(slots=True)
class _Group:
    """Tensors that are looked at as one, by their places in the list; `size` in bytes; `flat` what is looked at."""

    device: torch.device
    members: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    """Of the members, in bytes."""
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
    source: tuple[int, int] | None = None
    """Which launch finds the sum, and its place among those, where one launch reads a list."""
    in_place: bool = False
    """Whether that reads every member where it lies, because each begins with a whole word of the group."""

    @property
    def on_cpu(self) -> bool:
        """Whether the members are a CPU's."""
        return self.device.type == "cpu"

    def copy_into(self, words: Tensor, dtype: torch.dtype) -> None:
        """Let `together` copy tensors of `dtype` into `words`, with zeros behind them."""
        self.room = words[: room_of(self.size)].view(dtype)
        self.copied = self.room[: self.size // dtype.itemsize]
        self.filler = [torch.zeros(self.room.numel() - self.copied.numel(), dtype=dtype, device="cpu")]

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


class _Listed:
    """Groups of one device, whose sums one launch finds."""

    def __init__(self, number: int, groups: Sequence[_Group]) -> None:
        """number: of the launch, among those of the look."""
        rows: list[tuple[int, int, int]] = []
        for place, group in enumerate(groups):
            begins = list(itertools.accumulate(group.sizes, initial=0))
            group.source, group.in_place = (number, place), not any(begin % _WORD for begin in begins[:-1])
            if group.in_place:
                rows += [(size, begin // _WORD, place) for begin, size in zip(begins, group.sizes, strict=False)]
            else:
                rows.append((group.size, 0, place))
        self._groups = groups
        self._sums = ListSums(groups[0].device, rows)

    def look(self) -> Tensor:
        """int64 [groups] on the device."""
        return self._sums.look([each for group in self._groups for each in _as_read(group)])

    def norms(self) -> list[Tensor]:
        """0-dim tensors, whose 2-norm is that of all elements."""
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for tensor in (each for group in self._groups for each in group.flat):
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
        return [
            norm
            for dtype, same in by_dtype.items()
            for norm in torch._foreach_norm(same, 2, dtype=torch.float32 if dtype.itemsize < 4 else dtype)
        ]


def _as_read(group: _Group) -> list[Tensor]:
    return group.flat if group.in_place else [torch.cat(group.flat)]


@functools.lru_cache(maxsize=1)
def _scratch() -> Tensor:
    """Memory of a CPU for what is copied together. A new piece for each copy would cost more than the copy."""
    return torch.empty(room_of(_GROUP_BYTES), dtype=torch.int64, device="cpu")


def chained(digest: int, following: Iterable[int]) -> int:
    """One digest in [0, 2^64) of `digest` and those `following`, in their order."""
    for value in following:
        # `mix_integer`, written out: a GPU's weights have hundreds of sums.
        digest = digest + value & _MASK
        digest = (digest ^ digest >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        digest = (digest ^ digest >> 27) * 0x94D049BB133111EB & _MASK
        digest ^= digest >> 31
    return digest


def flat_digest(tensors: Iterable[Tensor]) -> int:
    """One digest in [0, 2^64) of the bits of `tensors` in order, as an `Observer` gives it."""
    return Observer().look(list(tensors)).digest


def norm_of(tensors: Iterable[Tensor]) -> float:
    """The 2-norm of all elements. It overflows if their squares overflow fp32, because torch's clipping does so too."""
    return _joined([_norm(part) for part in _chunks(tensors)])


def _chunks(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """The elements of `tensors` in order as 1-dim tensors, to be read and not kept; small neighbours of one kind are
    copied together, since to look at each costs more than to read it.
    """
    small: list[Tensor] = []
    kind: Hashable = None
    size = 0
    for tensor in map(plain, tensors):
        bytes_ = tensor.numel() * tensor.element_size()
        mine = (tensor.dtype, tensor.device)
        if small and (mine != kind or size + bytes_ > _CHUNK_BYTES or bytes_ > _SMALL_BYTES):
            yield torch.cat(small) if len(small) > 1 else small[0]
            small, size = [], 0
        if bytes_ > _SMALL_BYTES:
            yield tensor.reshape(-1)
            continue
        small.append(tensor.reshape(-1))
        kind, size = mine, size + bytes_
    if small:
        yield torch.cat(small) if len(small) > 1 else small[0]


def _norm(part: Tensor) -> Tensor:
    if part.device.type == "cpu" and part.dtype in _NARROW and part.numel() > _LONG:
        return torch.tensor(sum_of_squares(part), dtype=torch.float64, device="cpu").float().sqrt()
    norm: Tensor = torch.linalg.vector_norm(part.float() if part.element_size() < 4 else part)
    return norm


def _joined(norms: Sequence[Tensor]) -> float:
    if len(norms) <= 1:
        return float(norms[0]) if norms else 0.0
    return float(_norm_of_norms(norms))


def _norm_of_norms(norms: Sequence[Tensor]) -> Tensor:
    found: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0]) for norm in norms]))
    return found


def _fewer(norms: list[Tensor]) -> list[Tensor]:
    """One of many that are on an accelerator, so that one number is brought to the host."""
    there = len(norms) > 1 and any(norm.device.type != "cpu" for norm in norms)
    return [_norm_of_norms(norms)] if there else norms


# Gradients as they appear: the smallest and the largest element of each.


def extremes(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest and the largest element, 0-dim, without a wait for the device; zeros for an empty tensor.

    Both are finite where all elements are, whatever their squares are; both are NaN where one is, zero where all are.
    """
    if type(tensor) not in ORDINARY or tensor.layout != torch.strided:
        tensor = plain(tensor)
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if not tensor.numel():
        return tensor.new_zeros(()), tensor.new_zeros(())
    low, high = torch.aminmax(tensor)
    return low, high


class Extremes:
    """The `extremes` of the gradients of some parameters, of any number of backward passes.

    They are written into places that are kept, so that a look costs one operation and reading costs one for all. Those
    of a GPU wait to be read many at once: until `flush`, unless another hook may change them before.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.any = False
        """Whether there is one."""
        self._kinds = [(parameter.dtype, parameter.device) for parameter in parameters]
        self._plain = [
            type(p) in ORDINARY and p.layout == torch.strided and p.is_floating_point() and p.numel() > 0
            for p in parameters
        ]
        self._passes = [0] * len(parameters)
        self._rooms: list[_Room] = []
        self._others: list[tuple[int, Tensor, Tensor]] = []
        self._parameters = parameters
        self._raw: dict[torch.device, RawGradients] = {}
        whole = sum(parameter.nbytes for parameter in parameters)
        for device in filter(listable, {parameter.device for parameter in parameters}):
            self._raw[device] = RawGradients(device, max(_LEAST_BYTES, whole // _MOST_SHARE))

    def add(self, index: int, gradient: Tensor) -> None:
        """A backward pass gave `gradient` to parameter `index`."""
        self.any = True
        if self._plain[index] and self._raw and self._waits(index, gradient):
            return
        if self._plain[index]:
            number = self._passes[index]
            if number == len(self._rooms):
                self._rooms.append(_Room(self._kinds))
            try:
                torch.aminmax(gradient, out=self._rooms[number].places[index])
            except RuntimeError:
                # Of another dtype, layout or device than its parameter was, empty, or itself to be differentiated.
                self._plain[index] = False
            else:
                self._passes[index] = number + 1
                return
        self._others.append((index, *extremes(gradient)))

    def add_all(self, indices: Sequence[int], gradients: Sequence[Tensor]) -> None:
        """The same of many, as they are now: on a GPU, those of one dtype in one launch. No wait for it."""
        self.any = True
        together: dict[tuple[torch.device, torch.dtype], list[tuple[int, Tensor]]] = {}
        for index, gradient in zip(indices, gradients, strict=True):
            raw = self._raw.get(gradient.device) if self._plain[index] else None
            if raw is not None and raw.takes(gradient):
                together.setdefault((gradient.device, gradient.dtype), []).append((index, gradient))
            else:
                self.add(index, gradient)
        self.flush()
        for (device, _), found in together.items():
            self._raw[device].look([index for index, _ in found], [gradient for _, gradient in found])

    def _waits(self, index: int, gradient: Tensor) -> bool:
        parameter = self._parameters[index]
        raw = self._raw.get(gradient.device)
        # What else is told of the gradient may write to it; a write that was not foreseen is seen by its version.
        told = len(parameter._backward_hooks or ()) > 1 or bool(parameter._post_accumulate_grad_hooks)
        return raw is not None and not told and index not in raw.changed and raw.add(index, gradient)

    def flush(self) -> None:
        """Read what waits: a backward pass ends, and gradients are about to be reduced or changed. No wait."""
        for raw in self._raw.values():
            raw.flush()

    def waiting(self) -> list[list[Tensor]]:
        """What is read of devices, in lists that may be brought to the CPU before `read`."""
        self.flush()
        return [raw.keys for raw in self._raw.values()]

    def has(self, index: int) -> bool:
        """Whether there is one of parameter `index`."""
        there = self._passes[index] > 0 or any(index == one for one, _, _ in self._others)
        return there or any(raw.has(index) for raw in self._raw.values())

    def read(self) -> list[tuple[int, float, float]]:
        """(parameter, smallest, largest) of each; one wait for each table of places that was used."""
        found = [each for raw in self._raw.values() for each in raw.read()]
        for number in range(max(self._passes, default=0)):
            places = self._rooms[number].read()
            if min(self._passes) <= number:
                places = [place for place in places if self._passes[place[0]] > number]
            found += places
        if not self._others:
            return found
        lows, highs = numbers([low for _, low, _ in self._others]), numbers([high for _, _, high in self._others])
        return found + [(other[0], low, high) for other, low, high in zip(self._others, lows, highs, strict=True)]

    def clear(self) -> None:
        """Forget all of them."""
        self.any = False
        self._passes = [0] * len(self._passes)
        self._others.clear()
        for raw in self._raw.values():
            raw.clear()


class _Room:
    """Places for the extremes of one pass: a table [2, parameters] for each dtype and device."""

    def __init__(self, kinds: Sequence[tuple[torch.dtype, torch.device]]) -> None:
        self.places: dict[int, tuple[Tensor, Tensor]] = {}
        self._tables: list[tuple[list[int], Tensor]] = []
        for dtype, device in dict.fromkeys(kinds):
            owners = [index for index, kind in enumerate(kinds) if kind == (dtype, device)]
            table = torch.zeros(2, len(owners), dtype=dtype, device=device)
            self.places |= zip(owners, zip(table[0].unbind(), table[1].unbind(), strict=True), strict=True)
            self._tables.append((owners, table))

    def read(self) -> list[tuple[int, float, float]]:
        """(parameter, smallest, largest) of all places, written or not."""
        return [place for owners, table in self._tables for place in zip(owners, *table.tolist(), strict=True)]
