"""Digests, norms, extremes and finiteness of tensors, for the trainer and for a watch.

A look does not wait for a GPU. Its results stay on the device until a caller asks for a number.

- `word_sums` reads flat memory: one integer per tensor, the same on every device. The trainer keeps weights, gradient
  and moments flat, and its gate compares the sums on the device.
- An `Observer` reads a list of hundreds of tensors, as a loop has them, and gives one digest. On a CPU that is the
  checksum. A `portable` one has the word sums there too, which take several times as long: only for ranks on CPUs that
  are compared with ranks on other devices. On a GPU the digest is always portable, and takes one launch.
- `Extremes` reads gradients as they appear, on a GPU many in one launch.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor

from andon_contracts.checksum import PieceSums, checksum, padded_words
from andon_contracts.digest import WORD, kernels, word_sum_tensor
from andon_contracts.multi_tensor import FLOATS, ListSums, RawGradients, has_list_kernels, to_cpu

DENSE_TYPES = (Tensor, torch.nn.Parameter)
"""Types of tensors that are what they hold, unless they are sparse."""
_CHUNK_BYTES = 1 << 24
_GROUP_BYTES = 1 << 19
"""Tensors are copied and read together up to this size, because it fits the cache of a CPU."""
_SMALL_BYTES = 1 << 18
"""Larger tensors are read alone."""
_LEAST_BYTES, _MOST_SHARE = 1 << 25, 16
"""Raw gradients are read as soon as they have so many bytes, or one in so many of all bytes, whichever is more."""
_LONG = 1 << 17
"""Of more elements on a CPU, torch's own norm may be off by more than 5e-4 (`laws.loop.torch_norm_error`)."""
_PIECE = 1 << 20
"""Elements that are squared at once for a norm. Their fp32 squares (4 MiB) stay in a CPU's cache."""
_SUMS = 64
"""How many partial sums of each piece are read as numbers. Python adds those exactly."""
_LEAST = 1e-20
"""A smaller sum of fp32 squares may have lost squares that are too small for fp32."""
_WITH_VALUES = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_dtype_of, _device_of = attrgetter("dtype"), attrgetter("device")
_below_autograd: Callable[[], AbstractContextManager[None]] = getattr(
    torch._C, "_AutoDispatchBelowAutograd", torch.no_grad
)
"""As `no_grad`, but skips autograd's dispatch, which for many small tensors takes as long as reading them."""


def _is_dense(tensor: Tensor) -> bool:
    return (
        type(tensor) in DENSE_TYPES and tensor.layout == torch.strided and not (tensor.is_nested or tensor.is_quantized)
    )


def plain(tensor: Tensor) -> Tensor:
    """The dense tensor of this rank behind `tensor`: the local part of a distributed, the values of a sparse one."""
    if _is_dense(tensor):  # most are, and a list of parts would cost as much again
        return tensor.detach()
    parts = dense_parts(tensor)
    return parts[0] if len(parts) == 1 else torch.cat([p.contiguous().view(-1).view(torch.uint8) for p in parts])


def dense_parts(tensor: Tensor) -> list[Tensor]:
    """The dense tensors of this rank that hold what `tensor` does: itself, or those of which a wrapper is made.

    A wrapper is a subclass that has no memory of its own, as quantized weights and moments are.
    """
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    tensor = tensor.detach()
    if _is_dense(tensor):
        return [tensor]
    if type(tensor) not in DENSE_TYPES and hasattr(tensor, "__tensor_flatten__") and not tensor.is_nested:
        names, _ = tensor.__tensor_flatten__()
        return [part for name in names for part in dense_parts(getattr(tensor, name))]
    if tensor.layout == torch.sparse_coo:
        tensor = tensor.coalesce()
    if tensor.is_nested or tensor.layout in _WITH_VALUES:
        return [tensor.values().detach()]
    if tensor.is_quantized:
        return [tensor.int_repr()]
    return [tensor if tensor.layout == torch.strided else tensor.to_dense()]


def to_floats(scalars: Sequence[Tensor]) -> list[float]:
    """The values of 0-dim tensors of one dtype, with one wait for each device."""
    if len(scalars) <= 1:
        return [scalar.item() for scalar in scalars]  # a stack of one would be a launch more for nothing
    if len({scalar.device for scalar in scalars}) > 1:
        scalars = [scalar.cpu() for scalar in scalars]
    found: list[float] = torch.stack(list(scalars)).tolist()
    return found


def _local_parts(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """`tensors`, with this rank's part in the place of each distributed tensor: the same object each time, no alias."""
    distributed = {kind for kind in set(map(type, tensors)) if hasattr(kind, "to_local")}
    if not distributed:
        return tensors
    with torch.no_grad():  # with a graph it would be another tensor each time
        return tuple(t.to_local() if type(t) in distributed else t for t in tensors)  # type: ignore[attr-defined]


def _cat(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


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
    whole = tensor.dtype == torch.float32 and tensor.is_contiguous() and tensor.numel() > 0 and tensor.numel() % 2 == 0
    return whole and tensor.data_ptr() % WORD == 0 and tensor.storage_offset() % 2 == 0


def finite_total(tensor: Tensor) -> Tensor:
    """0-dim fp64 on the device of `tensor` (fp32 or less): finite exactly where every element is. No wait for it."""
    # NaN and Inf stay in any sum, and finite fp32 numbers cannot overflow fp64. A CPU is slow at a sum in fp64 of fp32
    # (it converts each element), so there the elements are looked at if their own sum is not finite.
    if tensor.device.type != "cpu":
        return tensor.sum(dtype=torch.float64)
    total = tensor.sum().double()
    if not math.isfinite(float(total)) and bool(torch.isfinite(tensor).all()):
        total.zero_()
    return total


def nonfinite(tensor: Tensor) -> Tensor:
    """0-dim bool on the tensor's device: whether any element is NaN or Inf. No wait for the device."""
    if tensor.dtype in FLOATS:
        return torch.isfinite(finite_total(tensor)).logical_not()
    return torch.isfinite(tensor).all().logical_not()


@dataclass(slots=True)
class Look:
    """The results of one look at a list of tensors, on their devices. Reading `digest` or `norm` waits for the device,
    unless `device_sums` and `norms` were brought to the CPU before.
    """

    count: int
    extra: int
    sums: list[int | tuple[int, int]]
    """In order: a number that a CPU found, or which tensor of `device_sums` has it, and at which place."""
    device_sums: list[Tensor]
    """1-dim int64 on a device."""
    norms: list[Tensor]
    """The 2-norm of all elements; empty if it was not asked for."""

    @property
    def digest(self) -> int:
        """The digest in [0, 2^64) of the tensors' bits in order, with `extra` added."""
        to_cpu(self.device_sums)
        found = [each.tolist() for each in self.device_sums]
        sums = [each if isinstance(each, int) else found[each[0]][each[1]] for each in self.sums]
        return (chained(self.count, sums) + self.extra) % (1 << 64)

    @property
    def norm(self) -> float:
        """The 2-norm of all elements, as `norm_of` gives it; 0.0 if it was not asked for."""
        return float(self.norms[0]) if self.norms else 0.0


class Observer:
    """Looks at one list of tensors again and again, and keeps the layout of its reads until the tensors change.

    The digest binds bits and order; names and shapes are to be compared apart. It is one on all CPUs; `portable` ones,
    as all other devices give them, are one everywhere.
    """

    def __init__(self, *, portable: bool = False, stable: bool = False) -> None:
        """stable: the tensors are mostly the same ones in the same memory, as weights are and gradients are not."""
        self.portable = portable
        self._stable = stable
        self._kinds: list[object] | None = None
        self._special = False
        """Whether a tensor of these kinds is read by way of `plain`."""
        self._layout: list[object] | None = None
        self._order: list[_Group | tuple[int, int]] = []
        """In the order of the digest: a group, or which of `_lists` has the sum and at which place."""
        self._lists: list[_GpuList] = []
        self._piece_sums = PieceSums((), _shared_buffer())
        self._copied = False
        """Whether the groups hold copies of the tensors, which must not be read again."""
        self._places: list[int] = []
        self._held: Sequence[Tensor] = ()

    def look(self, tensors: Sequence[Tensor], *, norm: bool = False, extra: int = 0) -> Look:
        """Read the bits of `tensors` now; norm: their norm too. No wait for a device.

        extra: a digest in [0, 2^64) of what else is known of them, which becomes a part of theirs.
        """
        tensors = _local_parts(tensors)
        try:
            return self._look(tensors, norm, extra)
        except RuntimeError:
            # Other devices or kinds of tensors under the dtypes and sizes of before; or an error that comes up again.
            self._kinds = self._layout = None
            return self._look(tensors, norm, extra, replan=True)

    def _look(self, tensors: Sequence[Tensor], norm: bool, extra: int, *, replan: bool = False) -> Look:
        if replan or not self._stable or self._copied or self._moved(tensors):
            layout = _layout(tensors)
            if layout != self._kinds:
                self._kinds, self._special = layout, any(not _is_dense(t) or t.is_complex() for t in tensors)
            if self._special:
                with (
                    torch.no_grad()
                ):  # an operator of a sparse or a distributed tensor is found through autograd's keys
                    tensors = [plain(tensor).resolve_conj().resolve_neg() for tensor in tensors]
                layout = _layout(tensors)  # a sparse tensor may have more values than before
            with _below_autograd():
                if layout != self._layout:
                    self._plan(tensors)
                    self._layout = layout
                self._fill(tensors)
        with _below_autograd():
            return self._read(len(tensors), norm, extra)

    def _moved(self, tensors: Sequence[Tensor]) -> bool:
        """Whether one of `tensors` is another one than before, or in other memory."""
        places = [*map(Tensor.data_ptr, tensors), *map(Tensor.numel, tensors)]
        if tensors is not self._held or not isinstance(tensors, tuple):
            places += map(id, tensors)
        moved = places != self._places
        # While they are held, nothing else can have their identities.
        self._places, self._held = places, tensors
        return moved

    def _plan(self, tensors: Sequence[Tensor]) -> None:
        lists: dict[torch.device, list[list[int]]] = {}
        self._order = []
        for members in _grouped(tensors):
            device = tensors[members[0]].device
            if has_list_kernels(device):
                groups = lists.setdefault(device, [])
                self._order.append((list(lists).index(device), len(groups)))
                groups.append(members)
            else:
                self._order.append(_Group(members, tensors, flat=self._stable))
        self._lists = [_GpuList(groups, tensors) for groups in lists.values()]
        copied = [group for group in self._order if isinstance(group, _Group) and group.copied is not None]
        self._piece_sums = PieceSums([group.size for group in copied], _shared_buffer())
        for piece, group in enumerate(copied):
            group.piece = piece

    def _fill(self, tensors: Sequence[Tensor]) -> None:
        self._copied = self._special or (self._stable and not all(map(Tensor.is_contiguous, tensors)))
        if self._copied:
            self._places = []  # of a look before this one, which must not be taken for the last
        for group in (*self._order, *self._lists):
            if not isinstance(group, tuple):
                group.fill(tensors)

    def _read(self, count: int, norm: bool, extra: int) -> Look:
        waiting = [each.sums() for each in self._lists]
        norms = [found for each in self._lists for found in each.norms()] if norm else []
        alone: list[int | tuple[int, int]] = []
        for group in self._order:
            if isinstance(group, tuple):
                alone.append(group)
                continue
            part = group.joined()
            if not group.on_cpu:
                alone.append((len(waiting), 0))
                waiting.append(word_sum_tensor(part).view(1))
            elif self.portable:
                alone.append(int(word_sum_tensor(part)))
            elif group.copied is None:
                alone.append(checksum(part))
            else:
                self._piece_sums.take(group.piece)
            if norm:
                norms.append(_norm(part))
            if not self._stable:
                group.flat = []
        if not self._stable:
            for each in self._lists:
                each.flat = []
        together = [] if self.portable else self._piece_sums.fold()
        return Look(count, extra, [*together, *alone], waiting, _joined(norms))


def _layout(tensors: Sequence[Tensor]) -> list[object]:
    return [*map(_dtype_of, tensors), *map(Tensor.numel, tensors), *map(_device_of, tensors)]


def _grouped(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Which of these dense tensors are read together: small ones of one dtype and device. A large one stays alone."""
    groups: list[list[int]] = []
    open_: dict[Hashable, tuple[list[int], int]] = {}
    for index, tensor in enumerate(tensors):
        kind = (tensor.dtype, tensor.device)
        members, size = open_.get(kind, (None, 0))
        if tensor.nbytes > _SMALL_BYTES:
            groups.append([index])
        elif members is None or size + tensor.nbytes > _GROUP_BYTES:
            groups.append([index])
            open_[kind] = groups[-1], tensor.nbytes
        else:
            members.append(index)
            open_[kind] = members, size + tensor.nbytes
    return groups


class _Group:
    """Tensors that are read as one. Several small ones of a CPU are copied into memory that all groups share."""

    copied: Tensor | None = None
    """Where they are copied to."""
    piece = 0
    """Their number in the observer's `PieceSums`, if they are copied."""

    def __init__(self, members: list[int], tensors: Sequence[Tensor], *, flat: bool) -> None:
        """flat: make them flat before they are copied, which pays if they are the same ones in the next look."""
        first = tensors[members[0]]
        self.size = sum(tensors[index].nbytes for index in members)
        self.on_cpu = first.device.type == "cpu"
        self.flat: list[Tensor] = []
        self._members = members
        self._filler: list[Tensor] = []
        self._places: list[Tensor] = []
        if self.on_cpu and len(members) > 1 and first.itemsize <= WORD:
            self._room = _shared_buffer()[: padded_words(self.size)].view(first.dtype)
            self.copied = self._room[: self.size // first.itemsize]
            self._filler = [torch.zeros(self._room.numel() - self.copied.numel(), dtype=first.dtype, device="cpu")]
            if not flat:
                parts = [*(tensors[index] for index in members), *self._filler]
                rooms = torch.split(self._room, [*map(Tensor.numel, parts)])
                self._places = [room.view(part.shape) for room, part in zip(rooms, parts, strict=True)]

    def fill(self, tensors: Sequence[Tensor]) -> None:
        members = [tensors[index] for index in self._members]
        self.flat = [*(members if self._places else [each.contiguous().view(-1) for each in members]), *self._filler]

    def joined(self) -> Tensor:
        """All elements as one 1-dim tensor, to be read before the next group is."""
        if self.copied is None:
            return _cat(self.flat).detach()
        if self._places:
            torch._foreach_copy_(self._places, self.flat)
        else:
            torch.cat(self.flat, out=self._room)
        return self.copied


class _GpuList:
    """Groups of one GPU. One launch finds all their sums."""

    def __init__(self, groups: list[list[int]], tensors: Sequence[Tensor]) -> None:
        self.flat: list[list[Tensor]] = []
        """The members of each group, contiguous."""
        self._groups = groups
        self._in_place: list[bool] = []
        """Whether each member begins with a whole word of its group, and so is read where it lies."""
        rows: list[tuple[int, int, int]] = []
        for place, members in enumerate(groups):
            sizes = [tensors[index].nbytes for index in members]
            *begins, total = itertools.accumulate(sizes, initial=0)
            self._in_place.append(not any(begin % WORD for begin in begins))
            if self._in_place[place]:
                rows += [(size, begin // WORD, place) for size, begin in zip(sizes, begins, strict=True)]
            else:
                rows.append((total, 0, place))
        self._sums = ListSums(tensors[groups[0][0]].device, rows)

    def fill(self, tensors: Sequence[Tensor]) -> None:
        self.flat = [[tensors[index].contiguous() for index in members] for members in self._groups]

    def sums(self) -> Tensor:
        """int64 [groups] on the device."""
        read: list[Tensor] = []
        for members, in_place in zip(self.flat, self._in_place, strict=True):
            read += members if in_place else [torch.cat([each.view(-1) for each in members])]
        return self._sums.read(read)

    def norms(self) -> list[Tensor]:
        """0-dim tensors, whose 2-norm is that of all elements."""
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for tensor in itertools.chain.from_iterable(self.flat):
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
        return [
            norm
            for dtype, same in by_dtype.items()
            for norm in torch._foreach_norm(same, 2, dtype=torch.float32 if dtype.itemsize < 4 else dtype)
        ]


@functools.lru_cache(maxsize=1)
def _shared_buffer() -> Tensor:
    """Memory of a CPU for what is copied together. A new piece for each copy would cost more than the copy."""
    return torch.empty(padded_words(_GROUP_BYTES), dtype=torch.int64, device="cpu")


def chained(digest: int, following: Iterable[int]) -> int:
    """One digest in [0, 2^64) of `digest` and those `following`, in their order."""
    mask = (1 << 64) - 1
    for value in following:
        # `mix_integer`, written out: a GPU's weights have hundreds of sums.
        digest = digest + value & mask
        digest = (digest ^ digest >> 30) * 0xBF58476D1CE4E5B9 & mask
        digest = (digest ^ digest >> 27) * 0x94D049BB133111EB & mask
        digest ^= digest >> 31
    return digest


def flat_digest(tensors: Iterable[Tensor]) -> int:
    """One digest in [0, 2^64) of the bits of `tensors` in order, as an `Observer` gives it."""
    return Observer().look(list(tensors)).digest


def norm_of(tensors: Iterable[Tensor]) -> float:
    """The 2-norm of all elements. It overflows if their squares overflow fp32, because torch's clipping does so too."""
    norms = _joined([_norm(part) for part in _chunks(tensors)])
    return float(norms[0]) if norms else 0.0


def _chunks(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """The elements of `tensors` in order as 1-dim tensors, to be read and not kept. Small neighbours of one kind are
    copied together, since a read of each would cost more than its elements.
    """
    small: list[Tensor] = []
    kind: Hashable = None
    size = 0
    for tensor in map(plain, tensors):
        mine, bytes_ = (tensor.dtype, tensor.device), tensor.nbytes
        if small and (mine != kind or size + bytes_ > _CHUNK_BYTES or bytes_ > _SMALL_BYTES):
            yield _cat(small)
            small, size = [], 0
        if bytes_ > _SMALL_BYTES:
            yield tensor.reshape(-1)
        else:
            small.append(tensor.reshape(-1))
            kind, size = mine, size + bytes_
    if small:
        yield _cat(small)


def _norm(part: Tensor) -> Tensor:
    if part.device.type == "cpu" and part.dtype in FLOATS and part.numel() > _LONG:
        return torch.tensor(sum_of_squares(part), dtype=torch.float64, device="cpu").float().sqrt()
    norm: Tensor = torch.linalg.vector_norm(part.float() if part.element_size() < 4 else part)
    return norm


def _joined(norms: list[Tensor]) -> list[Tensor]:
    """At most one norm, that of all: one number is brought to the host."""
    if len(norms) <= 1:
        return norms
    return [torch.linalg.vector_norm(torch.stack([norm.to(norms[0]) for norm in norms]))]


# The 2-norm of a long tensor, to a few roundings of fp32 at any length.
#
# On a CPU, torch's fp32 norm adds the squares of a tensor into 8 running sums. The larger these grow, the more of each
# square is rounded away: the norm of 22.7 million normal numbers is off by 1e-3, that of 100 million by 1e-2. Here
# squares are added pairwise, by elementwise operations alone. IEEE arithmetic rounds these alike, so the bits are the
# same under AVX2 and AVX-512 and for any number of threads.


def flat_norm(flat: Tensor) -> Tensor:
    """The 2-norm of `flat` (fp32, 1-dim), 0-dim fp32 on its device. Does not wait for a GPU.

    The relative error is at most 8.5 * 2^-24 at any length. The result is finite if all elements are and their norm
    fits fp32. On a CPU it needs memory for at most 2^20 elements.
    """
    if flat.device.type != "cpu":
        # Torch's GPU kernel sums blocks of 65,536 elements and then the blocks, here in float64, and copies nothing.
        (norm,) = torch._foreach_norm([flat.detach()], 2, dtype=torch.float64)
        return norm.float()
    return torch.tensor(math.sqrt(sum_of_squares(flat)), dtype=torch.float64, device="cpu").float()


def sum_of_squares(tensor: Tensor) -> float:
    """The sum of the squares of a CPU's `tensor` (fp32 or less, any shape), to 15 * 2^-24 of it, beyond fp32 too."""
    total = _pairwise(tensor, torch.float32)
    if _LEAST < total < math.inf:
        return total
    # Squares of fp32 numbers are exact in float64, and none of them overflows or underflows there.
    return _pairwise(tensor, torch.float64)


def _pairwise(tensor: Tensor, dtype: torch.dtype) -> float:
    flat = tensor.detach().reshape(-1)
    elements = min(_PIECE, flat.numel()) * torch.float32.itemsize // dtype.itemsize
    room = torch.empty(max(1, elements), dtype=dtype, device="cpu")
    sums: list[float] = []
    for piece in torch.split(flat, room.numel()):
        squares = room[: piece.numel()]
        if piece.dtype != dtype:
            piece = squares.copy_(piece)
        torch.mul(piece, piece, out=squares)
        while squares.numel() > _SUMS:
            kept = -(-squares.numel() // 2)
            squares[: squares.numel() - kept].add_(squares[kept:])
            squares = squares[:kept]
        sums += squares.tolist()
    return math.fsum(sums)


# Gradients as they appear: the smallest and the largest element of each.


def extremes(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest and the largest element, 0-dim, without a wait for the device; zeros for an empty tensor.

    Both are finite if all elements are, whatever their squares are. Both are NaN if one is, zero if all are.
    """
    if type(tensor) not in DENSE_TYPES or tensor.layout != torch.strided:
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

    They are written into tables that are kept: a look costs one operation, and one wait reads a table. Gradients of a
    GPU wait to be read many at once: until `flush`, unless another hook may change them before.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.nonempty = False
        """Whether there is one."""
        self._parameters = parameters
        self._plain = [
            type(p) in DENSE_TYPES and p.layout == torch.strided and p.is_floating_point() and p.numel() > 0
            for p in parameters
        ]
        self._passes = [0] * len(parameters)
        """By parameter, how many gradients are in the tables: that of each pass is in a table of its own."""
        self._tables: list[_Tables] = []
        self._others: list[tuple[int, Tensor, Tensor]] = []
        most = max(_LEAST_BYTES, sum(parameter.nbytes for parameter in parameters) // _MOST_SHARE)
        devices = filter(has_list_kernels, {parameter.device for parameter in parameters})
        self._raw = {device: RawGradients(device, most) for device in devices}

    def add(self, index: int, gradient: Tensor) -> None:
        """A backward pass gave `gradient` to parameter `index`."""
        self.nonempty = True
        if self._plain[index]:
            if self._raw and self._waits(index, gradient):
                return
            number = self._passes[index]
            if number == len(self._tables):
                self._tables.append(_Tables(self._parameters))
            try:
                torch.aminmax(gradient, out=self._tables[number].places[index])
            except RuntimeError:
                # Of another dtype, layout or device than its parameter was, empty, or itself to be differentiated.
                self._plain[index] = False
            else:
                self._passes[index] = number + 1
                return
        self._others.append((index, *extremes(gradient)))

    def _waits(self, index: int, gradient: Tensor) -> bool:
        parameter = self._parameters[index]
        raw = self._raw.get(gradient.device)
        # Another hook may write to the gradient; a write that was not foreseen is seen by its version.
        told = len(parameter._backward_hooks or ()) > 1 or bool(parameter._post_accumulate_grad_hooks)
        return raw is not None and not told and index not in raw.changed and raw.add(index, gradient)

    def add_all(self, indices: Sequence[int], gradients: Sequence[Tensor]) -> None:
        """The same of many, as they are now: on a GPU, those of one dtype in one launch. No wait for it."""
        self.nonempty = True
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

    def flush(self) -> None:
        """Read what waits: a backward pass ends, and gradients are about to be reduced or changed. No wait."""
        for raw in self._raw.values():
            raw.flush()

    def device_results(self) -> list[list[Tensor]]:
        """What is read of devices, in lists that may be brought to the CPU before `read`."""
        self.flush()
        return [raw.keys for raw in self._raw.values()]

    def has(self, index: int) -> bool:
        """Whether there is one of parameter `index`."""
        there = self._passes[index] > 0 or any(index == one for one, _, _ in self._others)
        return there or any(raw.has(index) for raw in self._raw.values())

    def read(self) -> list[tuple[int, float, float]]:
        """(parameter, smallest, largest) of each; one wait for each table that was used."""
        found = [each for raw in self._raw.values() for each in raw.read()]
        for number in range(max(self._passes, default=0)):
            places = self._tables[number].read()
            if min(self._passes) <= number:
                places = [place for place in places if self._passes[place[0]] > number]
            found += places
        lows, highs = to_floats([low for _, low, _ in self._others]), to_floats([high for _, _, high in self._others])
        return found + [(other[0], low, high) for other, low, high in zip(self._others, lows, highs, strict=True)]

    def clear(self) -> None:
        """Forget all of them."""
        self.nonempty = False
        self._passes = [0] * len(self._passes)
        self._others.clear()
        for raw in self._raw.values():
            raw.clear()


class _Tables:
    """The extremes of one pass: a table [2, parameters] for each dtype and device."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.places: dict[int, tuple[Tensor, Tensor]] = {}
        self._tables: list[tuple[list[int], Tensor]] = []
        kinds = [(parameter.dtype, parameter.device) for parameter in parameters]
        for dtype, device in dict.fromkeys(kinds):
            owners = [index for index, kind in enumerate(kinds) if kind == (dtype, device)]
            table = torch.zeros(2, len(owners), dtype=dtype, device=device)
            self.places |= zip(owners, zip(table[0].unbind(), table[1].unbind(), strict=True), strict=True)
            self._tables.append((owners, table))

    def read(self) -> list[tuple[int, float, float]]:
        """(parameter, smallest, largest) of all places, written or not."""
        return [place for owners, table in self._tables for place in zip(owners, *table.tolist(), strict=True)]
