"""Reads lists of tensors on a GPU in one launch, if Triton is installed. Copies no tensor and does not wait.

A launch reads the addresses of the tensors from a table on the device, which is copied again only if a tensor moved.
Weights and moments stay where they are. `to_cpu` waits once, for any number of results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType

import torch
from torch import Tensor

from andon_contracts.digest import WORD, kernels

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes whose extremes one launch finds."""


def on_device(values: Tensor, device: torch.device) -> Tensor:
    """A copy of `values`, of a CPU, on `device`, which is not waited for."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


def to_cpu(*held: list[Tensor]) -> None:
    """Replace each tensor on an accelerator by its copy on the CPU, with one wait for each device.

    For small results, because they are copied together.
    """
    start_to_cpu(*held)()


def start_to_cpu(*held: list[Tensor]) -> Callable[[], None]:
    """Start the copies of `to_cpu`, after what the devices have to do now. Returns a function that waits for them."""
    by_device: dict[torch.device, list[tuple[list[Tensor], int]]] = {}
    for each in held:
        for index, tensor in enumerate(each):
            if tensor.device.type != "cpu":
                by_device.setdefault(tensor.device, []).append((each, index))
    sent = [_send(device, places) for device, places in by_device.items()]

    def wait() -> None:
        for finish in sent:
            finish()

    return wait


def _send(device: torch.device, places: list[tuple[list[Tensor], int]]) -> Callable[[], None]:
    # Wide elements first, so that each lies where its dtype can be read.
    places.sort(key=lambda place: -place[0][place[1]].element_size())
    tensors = [each[index].detach() for each, index in places]
    flat = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]
    there = flat[0] if len(flat) == 1 else torch.cat(flat)
    arrived = torch.cuda.Event() if device.type == "cuda" else None
    if arrived is None:
        raw = there.cpu()
    else:
        raw = torch.empty(there.numel(), dtype=torch.uint8, device="cpu", pin_memory=True)
        raw.copy_(there, non_blocking=True)
        arrived.record(torch.cuda.current_stream(device))

    def finish() -> None:
        if arrived is not None:
            arrived.synchronize()
        parts = torch.split(raw, [part.numel() for part in flat])
        for (each, index), tensor, part in zip(places, tensors, parts, strict=True):
            each[index] = part.view(tensor.dtype).view(tensor.shape)

    return finish


class ListSums:
    """The word sums of tensors on `device`, of sizes that never change; several may add up to one."""

    def __init__(self, device: torch.device, rows: Sequence[tuple[int, int, int]]) -> None:
        """rows: (bytes, position of the first word, place of the sum) of each."""
        self._device, self._kernels = device, _kernels()
        self._count = 1 + max((place for _, _, place in rows), default=-1)
        self._bytes = sum(size for size, _, _ in rows)
        self._there = [index for index, (size, _, _) in enumerate(rows) if size]
        filled = [rows[index] for index in self._there]
        *first, self._programs = self._kernels.first_programs([-(-size // WORD) for size, _, _ in filled], self._bytes)
        table = [(0, *row, begin) for row, begin in zip(filled, first, strict=True)]
        self._rows = torch.tensor(table, device="cpu").view(-1, self._kernels.LIST_COLUMNS)
        self._places: list[int] = []
        self._table = self._rows

    def read(self, tensors: Sequence[Tensor]) -> Tensor:
        """int64 [sums] on the device: of the contiguous memory of `tensors` now. No wait for the device."""
        out = torch.zeros(self._count, dtype=torch.int64, device=self._device)
        if not self._programs:
            return out
        places = [tensors[index].data_ptr() for index in self._there]
        if places != self._places:
            self._rows[:, 0] = torch.tensor(places, device="cpu")
            # A copy, because the rows may be written again before the device has read them.
            self._table, self._places = on_device(self._rows.clone(), self._device), places
        self._kernels.list_sums_on_device(self._table, out, self._programs, self._bytes)
        return out


def list_extremes(tensors: Sequence[Tensor]) -> Tensor:
    """int32 [n, 2] on the device of `tensors`: the keys of the extremes of each, to be read by `extremes_of_keys`.

    They are contiguous and not empty, and of one dtype of `FLOATS`. No wait for the device.
    """
    found, first = _kernels(), tensors[0]
    counts = [tensor.numel() for tensor in tensors]
    size = sum(counts) * first.element_size()
    *begins, programs = found.first_programs(counts, size)
    known = torch.tensor([[tensor.data_ptr() for tensor in tensors], counts, begins], device="cpu")
    index = torch.arange(len(tensors), device="cpu")
    rows = on_device(torch.stack([known[0], known[1], index * 0, index, known[2]], 1), first.device)
    none = torch.tensor([found.NO_EXTREMES] * len(tensors), dtype=torch.int32, device="cpu")
    out = on_device(none, first.device)
    found.list_extremes_on_device(rows, out, programs, size, first.dtype)
    return out


def extremes_of_keys(keys: Tensor) -> list[tuple[float, float]]:
    """(smallest, largest) by the int32 [n, 2] that `list_extremes` gave, on a CPU; both are NaN where one is."""
    bits = keys ^ (keys >> 31 & 0x7FFFFFFF)
    found = bits.view(torch.float32)
    odd = found.isnan().any(1, keepdim=True)
    pairs: list[tuple[float, float]] = list(map(tuple, found.masked_fill(odd, float("nan")).tolist()))
    return pairs


def has_list_kernels(device: torch.device) -> bool:
    """Whether one launch can read a list of tensors on `device`: a GPU where Triton is."""
    return device.type == "cuda" and kernels() is not None


def _kernels() -> ModuleType:
    found = kernels()
    assert found is not None
    return found


def equal_each(ones: Sequence[Tensor], others: Sequence[Tensor]) -> list[bool]:
    """Whether each of `ones` is equal to its tensor of `others`, of the same shapes, dtypes and devices."""
    equal: dict[int, bool] = {}
    lists: dict[torch.device, list[int]] = {}
    for index, (one, other) in enumerate(zip(ones, others, strict=True)):
        if has_list_kernels(one.device) and one.is_contiguous() and other.is_contiguous():
            lists.setdefault(one.device, []).append(index)
        else:
            equal[index] = torch.equal(one, other)
    for device, places in lists.items():
        reader = ListSums(device, [(ones[index].nbytes, 0, place) for place, index in enumerate(places)])
        sums = [reader.read([each[index] for index in places]) for each in (ones, others)]
        to_cpu(sums)
        equal |= zip(places, sums[0].eq(sums[1]).tolist(), strict=True)
    return [equal[index] for index in range(len(ones))]


class RawGradients:
    """Gradients of one GPU as a backward pass gives them, whose extremes are found together, a little later.

    What waits is held as an alias, so that torch still lets a parameter take the gradient's memory for its own. Where a
    gradient is copied instead, that memory is held longer: for at most `most` bytes.
    """

    def __init__(self, device: torch.device, most: int) -> None:
        self._device, self._most = device, most
        self._held: list[tuple[int, Tensor, int]] = []
        """(parameter, its gradient, the version of that) of what waits."""
        self._bytes = 0
        self._stream: torch.cuda.Stream | None = None
        self.owners: list[list[int]] = []
        """By launch, the parameters."""
        self.keys: list[Tensor] = []
        """By launch, the result of `list_extremes`."""
        self.changed: list[int] = []
        """Parameters whose gradient was written between `add` and its read; these gradients must be read at once."""

    def add(self, index: int, gradient: Tensor) -> bool:
        """Take the gradient of parameter `index`; whether it is one of those that can be read together."""
        if not self.takes(gradient):
            return False
        stream = torch.cuda.current_stream(self._device)
        if self._held and (stream != self._stream or gradient.dtype != self._held[0][1].dtype):
            self.flush()
        self._stream = stream
        self._held.append((index, gradient.detach(), gradient._version))
        self._bytes += gradient.nbytes
        if self._bytes > self._most:
            self.flush()
        return True

    def takes(self, gradient: Tensor) -> bool:
        """Whether `gradient` is one of those that can be read together."""
        dense = gradient.dtype in FLOATS and gradient.layout == torch.strided and gradient.is_contiguous()
        return dense and not torch.cuda.is_current_stream_capturing()

    def look(self, indices: list[int], gradients: Sequence[Tensor]) -> None:
        """Read gradients of one dtype as they are now, by the stream at hand. No wait for it."""
        self.keys.append(list_extremes(gradients))
        self.owners.append(indices)

    def flush(self) -> None:
        """Read what waits, behind what the device has to do. No wait for it."""
        if not self._held:
            return
        self.changed += [index for index, gradient, version in self._held if gradient._version != version]
        current = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            self.look([index for index, _, _ in self._held], [gradient for _, gradient, _ in self._held])
        if self._stream is not None and current != self._stream:
            # A backward pass may have a stream of its own, and the keys are read on this one.
            current.wait_stream(self._stream)
            self.keys[-1].record_stream(current)
        self._held, self._bytes = [], 0

    def read(self) -> list[tuple[int, float, float]]:
        """(parameter, smallest, largest) of each gradient; one wait, unless `keys` were brought before."""
        self.flush()
        to_cpu(self.keys)
        return [
            (owner, low, high)
            for owners, keys in zip(self.owners, self.keys, strict=True)
            for owner, (low, high) in zip(owners, extremes_of_keys(keys), strict=True)
        ]

    def has(self, index: int) -> bool:
        """Whether there is one of parameter `index`."""
        return any(index == held[0] for held in self._held) or any(index in owners for owners in self.owners)

    def clear(self) -> None:
        """Forget all of them."""
        self._held, self._bytes, self.owners, self.keys = [], 0, [], []
