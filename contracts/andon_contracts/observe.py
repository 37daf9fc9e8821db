"""Digests, norms, extremes and finiteness of tensors, for the trainer and for a watch.

Results stay on the device until a caller reads a number. `to_cpu` copies them with one wait for each device.

- `word_sums` reads flat memory, in which the trainer has weights, gradient and moments.
- An `Observer` reads a list of hundreds of tensors and computes one digest, on a GPU with Triton in one launch. On a
  CPU it is the checksum, or the word sums if it must equal the digest of another device (`portable`).
- `Extremes` reads gradients when they arrive.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor
from torch._C._nn import flatten_dense_tensors

from andon_contracts.digest import WORD, checksum, kernels, word_sum_tensor

DENSE_TYPES = frozenset((Tensor, torch.nn.Parameter))  # they hold the elements themselves, unless they are sparse
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_GROUP_BYTES = 1 << 19  # tensors are copied and read together up to this size, because it fits the cache of a CPU
_SMALL_BYTES = 1 << 18  # larger tensors are read alone
_LONG = 1 << 17  # on a CPU, torch's norm of more elements may be off by more than 5e-4 (`clipping.torch_norm_error`)
_PIECE = 1 << 20  # elements that are squared at once: their fp32 squares (4 MiB) stay in a CPU's cache
_SUMS = 64  # the partial sums per piece that Python adds exactly
_LEAST = 1e-20  # a smaller sum of fp32 squares may have lost squares that are too small for fp32
_WITH_VALUES = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_READ_AS_IS = frozenset((dtype, torch.strided, False) for dtype in (*FLOATS, torch.float64, torch.int64, torch.bool))
_kind_of, _dtype_of, _device_of = attrgetter("dtype", "layout", "is_nested"), attrgetter("dtype"), attrgetter("device")


def to_cpu(*lists: list[Tensor]) -> None:
    """Replace each small tensor on an accelerator by its copy on the CPU, with one wait for each device."""
    start_to_cpu(*lists)()


def start_to_cpu(*lists: list[Tensor]) -> Callable[[], None]:
    """Queue the copies of `to_cpu` on the devices. Returns a function that waits for them."""
    by_device: dict[torch.device, list[tuple[list[Tensor], int]]] = {}
    for tensors in lists:
        for index, tensor in enumerate(tensors):
            if tensor.device.type != "cpu":
                by_device.setdefault(tensor.device, []).append((tensors, index))
    copies: list[tuple[Tensor, list[tuple[list[Tensor], int]], list[Tensor], torch.cuda.Event | None]] = []
    for device, slots in by_device.items():
        # Wide elements come first, so that each tensor is aligned for its dtype.
        slots.sort(key=lambda slot: -slot[0][slot[1]].element_size())
        tensors = [holder[index].detach() for holder, index in slots]
        joined = flatten_dense_tensors([tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in tensors])
        if device.type == "cuda":
            raw = torch.empty(joined.numel(), dtype=torch.uint8, device="cpu", pin_memory=True)
            raw.copy_(joined, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record(torch.cuda.current_stream(device))
            copies.append((raw, slots, tensors, arrived))
        else:
            copies.append((joined.cpu(), slots, tensors, None))

    def wait() -> None:
        for raw, slots, tensors, arrived in copies:
            if arrived is not None:
                arrived.synchronize()
            parts = torch.split(raw, [tensor.nbytes for tensor in tensors])
            for (holder, index), tensor, part in zip(slots, tensors, parts, strict=True):
                holder[index] = part.view(tensor.dtype).view(tensor.shape)

    return wait


def to_floats(scalars: Sequence[Tensor]) -> list[float]:
    """The values of 0-dim tensors of one dtype. Waits once if all are on one device, else once for each of them."""
    if len(scalars) > 1 and len({scalar.device for scalar in scalars}) == 1:
        scalars = list(torch.stack(list(scalars)).cpu())
    return [scalar.item() for scalar in scalars]


def is_dense(tensor: Tensor) -> bool:
    strided = type(tensor) in DENSE_TYPES and tensor.layout == torch.strided
    return strided and not (tensor.is_nested or tensor.is_quantized)


def plain(tensor: Tensor) -> Tensor:
    """This rank's elements as a dense tensor: the local part of a distributed tensor, the values of a sparse one.

    The indices of a sparse tensor are lost. A wrapper of several tensors gives their bytes as one uint8 tensor.
    """
    if is_dense(tensor):  # the common case, without the list of `dense_parts`
        return tensor.detach()
    parts = dense_parts(tensor)
    return parts[0] if len(parts) == 1 else torch.cat([p.contiguous().view(-1).view(torch.uint8) for p in parts])


def dense_parts(tensor: Tensor) -> list[Tensor]:
    """This rank's dense tensors with the elements of `tensor`. A quantized weight may be a wrapper of several."""
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    tensor = tensor.detach()
    if is_dense(tensor):
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


def word_sums(flats: Sequence[Tensor], *, finite: bool) -> Tensor:
    """int64 [n] on the tensors' device: the word sum of each tensor of `flats`, which have one size.

    finite: after the first sum comes a number that is nonzero if the first tensor has a NaN or Inf.
    """
    triton = kernels() if flats[0].is_cuda and all(map(_fits_kernel, flats)) else None
    if triton is not None:
        table = triton.word_sums([flat.detach().view(torch.int64) for flat in flats], finite=True)
        return torch.cat([table[0], table[1:, 0]]) if finite else table[:, 0]
    sums = [word_sum_tensor(flat) for flat in flats]
    if finite:
        sums.insert(1, nonfinite(flats[0]).to(torch.int64))
    return torch.stack(sums)


def _fits_kernel(flat: Tensor) -> bool:
    whole = flat.dtype == torch.float32 and flat.is_contiguous() and flat.numel() > 0 and flat.numel() % 2 == 0
    return whole and flat.data_ptr() % WORD == 0 and flat.storage_offset() % 2 == 0


def finite_total(tensor: Tensor) -> Tensor:
    """0-dim fp64 on the device of `tensor` (fp32 or less) that is finite if and only if all elements are."""
    # NaN and Inf survive any sum. On a CPU the fp32 sum decides, and the elements only if that is not finite.
    if tensor.device.type != "cpu":
        return torch._foreach_norm([tensor.detach()], 2, dtype=torch.float64)[0]  # a sum in fp64 copies the tensor
    total = tensor.sum().double()
    if not math.isfinite(float(total)) and bool(torch.isfinite(tensor).all()):
        total.zero_()
    return total


def nonfinite(tensor: Tensor) -> Tensor:
    """0-dim bool on the tensor's device: true if any element is NaN or Inf."""
    if tensor.dtype in FLOATS:
        return torch.isfinite(finite_total(tensor)).logical_not()
    return torch.isfinite(tensor).all().logical_not()


@dataclass(slots=True)
class Look:
    """The result of an `Observer`. `digest` and `norm` wait unless `to_cpu` has copied `device_sums` and `norms`."""

    count: int
    extra: int
    sums: list[int | tuple[int, int]]  # a CPU's sum, or the index of a tensor in `device_sums` and the place in it
    device_sums: list[Tensor]  # int64, 1-dim
    norms: list[Tensor]

    @property
    def digest(self) -> int:
        to_cpu(self.device_sums)
        lists = [sums.tolist() for sums in self.device_sums]
        sums = [each if isinstance(each, int) else lists[each[0]][each[1]] for each in self.sums]
        return (chained(self.count, sums) + self.extra) % (1 << 64)

    @property
    def norm(self) -> float:
        """The 2-norm of all elements; 0.0 if it was not requested."""
        return float(self.norms[0]) if self.norms else 0.0


class Observer:
    """Reads one list of tensors repeatedly, and caches the layout of its reads until the tensors change.

    The digest depends on bits and order, but not on names or shapes. It is equal on all CPUs. If the Observer is
    `portable` it is equal on all devices; a GPU always computes the portable digest.
    """

    def __init__(self, *, portable: bool = False) -> None:
        self.portable = portable
        self._layout: list[object] = []
        # In the order of the digest: the members of a group, or the index of a list in `_lists` and the place in it.
        self._order: list[list[int] | tuple[int, int]] = []
        self._lists: list[_GpuList] = []

    def look(self, tensors: Sequence[Tensor], *, norm: bool = False, extra: int = 0) -> Look:
        """Start reading the bits of `tensors`. norm: compute their norm too. extra: a number to add to the digest."""
        with torch.no_grad():
            read = tensors  # sets ask hundreds of tensors without a loop
            if not (DENSE_TYPES.issuperset(map(type, tensors)) and _READ_AS_IS.issuperset(map(_kind_of, tensors))):
                read = [plain(each).resolve_conj().resolve_neg() for each in tensors]
            layout = [*map(_dtype_of, read), *map(Tensor.numel, read), *map(_device_of, read)]
            if layout != self._layout:
                self._plan(read)
                self._layout = layout
            return self._read(read, norm, extra)

    def _plan(self, tensors: Sequence[Tensor]) -> None:
        lists: dict[torch.device, list[list[int]]] = {}
        self._order = []
        for members in _grouped(tensors):
            device = tensors[members[0]].device
            if device.type == "cuda" and kernels() is not None:
                groups = lists.setdefault(device, [])
                self._order.append((list(lists).index(device), len(groups)))
                groups.append(members)
            else:
                self._order.append(members)
        self._lists = [_GpuList(groups, tensors) for groups in lists.values()]

    def _read(self, tensors: Sequence[Tensor], norm: bool, extra: int) -> Look:
        device_sums, norms = list[Tensor](), list[Tensor]()
        for each in self._lists:
            flat = each.flat(tensors)
            device_sums.append(each.sums(flat))
            norms += each.norms(flat) if norm else []
        sums: list[int | tuple[int, int]] = []
        for group in self._order:
            if isinstance(group, tuple):
                sums.append(group)
                continue
            part: Tensor = flatten_dense_tensors([tensors[index] for index in group])
            if part.device.type != "cpu":
                sums.append((len(device_sums), 0))
                device_sums.append(word_sum_tensor(part).view(1))
            else:
                sums.append(int(word_sum_tensor(part)) if self.portable else checksum(part))
            norms += [_norm(part)] if norm else []
        return Look(len(tensors), extra, sums, device_sums, _joined(norms))


def _grouped(tensors: Sequence[Tensor]) -> list[list[int]]:
    # Small tensors of one dtype and device are read together.
    groups: list[list[int]] = []
    open_: dict[Hashable, tuple[list[int], int]] = {}
    for index, tensor in enumerate(tensors):
        kind, size = (tensor.dtype, tensor.device), tensor.nbytes
        if size > _SMALL_BYTES:
            groups.append([index])
            continue
        members, total = open_.get(kind, ([], _GROUP_BYTES + 1))
        if total + size > _GROUP_BYTES:
            members, total = [], 0
            groups.append(members)
        members.append(index)
        open_[kind] = members, total + size
    return groups


class _GpuList:
    # Groups of one GPU, whose sums one launch computes.
    def __init__(self, groups: list[list[int]], tensors: Sequence[Tensor]) -> None:
        self._groups = groups
        self._in_place: list[bool] = []  # each member of the group begins at a whole word of it
        rows: list[tuple[int, int, int]] = []
        for place, members in enumerate(groups):
            sizes = [tensors[index].nbytes for index in members]
            *begins, total = itertools.accumulate(sizes, initial=0)
            self._in_place.append(not any(begin % WORD for begin in begins))
            if self._in_place[place]:
                rows += [(size, begin // WORD, place) for size, begin in zip(sizes, begins, strict=True)]
            else:
                rows.append((total, 0, place))
        from andon_contracts.kernels import ListSums  # only with Triton

        self._sums = ListSums(tensors[groups[0][0]].device, rows)

    def flat(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        return [[tensors[index].detach().contiguous() for index in members] for members in self._groups]

    def sums(self, flat: list[list[Tensor]]) -> Tensor:
        read: list[Tensor] = []
        for members, in_place in zip(flat, self._in_place, strict=True):
            read += members if in_place else [torch.cat([each.view(-1) for each in members])]
        return self._sums.read(read)

    def norms(self, flat: list[list[Tensor]]) -> list[Tensor]:
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for tensor in itertools.chain.from_iterable(flat):
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
        norms: list[Tensor] = []
        for dtype, same in by_dtype.items():
            norms += torch._foreach_norm(same, 2, dtype=torch.float32 if dtype.itemsize < 4 else dtype)
        return norms


def chained(digest: int, following: Iterable[int]) -> int:
    """Fold the integers of `following` into `digest`, in order. Returns a digest in [0, 2^64)."""
    mask = (1 << 64) - 1
    for value in following:
        # `mix_integer` inline, because a GPU's weights have hundreds of sums.
        digest = digest + value & mask
        digest = (digest ^ digest >> 30) * 0xBF58476D1CE4E5B9 & mask
        digest = (digest ^ digest >> 27) * 0x94D049BB133111EB & mask
        digest ^= digest >> 31
    return digest


def flat_digest(tensors: Iterable[Tensor]) -> int:
    return Observer().look(list(tensors)).digest


def norm_of(tensors: Iterable[Tensor]) -> float:
    """The 2-norm of all elements; waits for their devices. It overflows if fp32 squares do, as in torch's clipping."""
    parts = list(map(plain, tensors))
    norms = [_norm(flatten_dense_tensors([parts[index] for index in members])) for members in _grouped(parts)]
    return float(_joined(norms)[0]) if norms else 0.0


def _norm(part: Tensor) -> Tensor:
    if part.device.type == "cpu" and part.dtype in FLOATS and part.numel() > _LONG:
        return torch.tensor(sum_of_squares(part), dtype=torch.float64, device="cpu").float().sqrt()
    norm: Tensor = torch.linalg.vector_norm(part.float() if part.element_size() < 4 else part)
    return norm


def _joined(norms: list[Tensor]) -> list[Tensor]:
    return norms if len(norms) <= 1 else [torch.linalg.vector_norm(torch.stack([n.to(norms[0]) for n in norms]))]


def flat_norm(flat: Tensor, share: Callable[[Tensor], Tensor] = lambda sums: sums) -> Tensor:
    """The 2-norm of `flat` (fp32, 1-dim), 0-dim fp32 on its device, with a relative error of at most 8.5 * 2^-24.

    It is finite if all elements are finite and it fits fp32. On a CPU it needs memory for at most 2^20 elements.
    share: if `flat` is some blocks of 2^20 elements of a vector, turns its fp64 [rows, n] into that of the vector.
    """
    if flat.device.type != "cpu":  # torch sums each block in one order, here in float64, without a copy
        norms = torch._foreach_norm(torch.split(flat.detach(), _PIECE), 2, dtype=torch.float64)
        return share(torch.stack(norms).square().unsqueeze(1)).sum().sqrt().float()
    return torch.tensor(math.sqrt(sum_of_squares(flat, share)), dtype=torch.float64, device="cpu").float()


def sum_of_squares(tensor: Tensor, share: Callable[[Tensor], Tensor] = lambda sums: sums) -> float:
    """The sum of the squares of a CPU `tensor` (fp32 or less, any shape): relative error 15 * 2^-24, no overflow."""
    for dtype in (torch.float32, torch.float64):
        sums = _pairwise(tensor, dtype)
        total = math.fsum(share(torch.tensor(sums, dtype=torch.float64, device="cpu").view(-1, _SUMS)).ravel().tolist())
        if _LEAST < total < math.inf:  # in float64, squares of fp32 numbers can neither overflow nor underflow
            break
    return total


def _pairwise(tensor: Tensor, dtype: torch.dtype) -> list[float]:
    # Torch's fp32 norm on a CPU loses more of each square as its 8 sums grow: 1e-3 in 22.7 million numbers. Here
    # squares are added pairwise, by operations with the same bits for AVX2, AVX-512 and any number of threads.
    flat = tensor.detach().reshape(-1)
    elements = min(_PIECE, flat.numel()) * torch.float32.itemsize // dtype.itemsize
    buffer = torch.empty(max(1, elements), dtype=dtype, device="cpu")
    sums: list[float] = []
    for piece in torch.split(flat, buffer.numel()):
        squares = buffer[: piece.numel()]
        if piece.dtype != dtype:
            piece = squares.copy_(piece)
        torch.mul(piece, piece, out=squares)
        while squares.numel() > _SUMS:
            half = -(-squares.numel() // 2)
            squares[: squares.numel() - half].add_(squares[half:])
            squares = squares[:half]
        sums += squares.tolist() + [0.0] * (_SUMS - squares.numel())
    return sums


def extremes(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest and the largest element, 0-dim, on the device. Zeros for no elements; both NaN if an element is."""
    if not is_dense(tensor) or tensor.requires_grad or tensor.is_complex():
        tensor = plain(tensor)
        tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    if not tensor.numel():
        return tensor.new_zeros(()), tensor.new_zeros(())
    return torch.aminmax(tensor)


class Extremes:
    """Collects the `extremes` of gradients, by a number of their parameter, and waits for no device before `read`."""

    def __init__(self) -> None:
        self.added: set[int] = set()  # the parameters with a gradient
        self._ends: dict[tuple[torch.device, torch.dtype], tuple[list[int], list[Tensor]]] = {}
        self._joined: list[list[Tensor]] = []

    def add(self, index: int, gradient: Tensor) -> None:
        self.added.add(index)
        ends = extremes(gradient)
        owners, tensors = self._ends.setdefault((ends[0].device, ends[0].dtype), ([], []))
        owners.append(index)
        tensors += ends

    def device_results(self) -> list[list[Tensor]]:
        """Lists for `to_cpu`, so that `read` waits for no device. No gradient may be added afterwards."""
        self._joined = [[] if ends[0].device.type == "cpu" else [torch.stack(ends)] for _, ends in self._ends.values()]
        return self._joined

    def read(self) -> list[tuple[int, float, float]]:
        """(parameter index, smallest, largest) of each gradient. Waits for each device and dtype."""
        found = []
        for (owners, ends), joined in zip(self._ends.values(), self._joined or self.device_results(), strict=True):
            values = joined[0].tolist() if joined else [end.item() for end in ends]
            found += list(zip(owners, values[::2], values[1::2], strict=True))
        return found

    def clear(self) -> None:
        self.added.clear()
        self._ends.clear()
        self._joined = []
