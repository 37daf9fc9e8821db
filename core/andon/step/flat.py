"""Trainable parameters as views of one flat fp32 buffer, their gradients as views of another, and their optimizer.

One buffer needs one reduction, one digest and one optimizer call, or two if some weights have no weight decay; these
come last. Every tensor starts at a multiple of 16 elements (64 bytes). The padding is always zero.

In a group of CPUs and GPUs (`mixed`) the optimizer uses copies of these buffers on the CPU, because a GPU rounds
divisions, sums and updates differently.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from andon.config.schema import Optimizer

_ALIGNMENT = 16
BLOCK = 1 << 20
"""Elements per block. A norm is a sum over blocks, so ranks divide a buffer between blocks without changing a bit."""
LEAST = 128
"""Blocks from which ranks divide the optimizer: a smaller one saves little memory, and the exchange takes time."""
_BUCKET_BLOCKS = 64
DIVIDING = ("gloo", "nccl")
"""The backends whose ranks divide the optimizer among them. Those of `mixed` round differently."""
_MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}
REPLACED = "weights of the model, or their gradients, were replaced by other tensors, which would not be trained"


@dataclass(frozen=True)
class Slot:
    name: str
    shape: tuple[int, ...]
    start: int
    end: int


def layout_of(parameters: Mapping[str, nn.Parameter]) -> tuple[tuple[Slot, ...], int]:
    """The slot of each parameter in the flat buffer, and the size of that buffer in elements."""
    slots: list[Slot] = []
    start = 0
    for name, parameter in parameters.items():
        slots.append(Slot(name, tuple(parameter.shape), start, start + parameter.numel()))
        start += -(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT
    return tuple(slots), start


def undecayed(model: nn.Module, trainable: Mapping[str, nn.Parameter]) -> frozenset[str]:
    """Names of the parameters without weight decay: biases, those of norms, and all with fewer than two dimensions."""
    norms = (module for module in model.modules() if "Norm" in type(module).__name__)
    owned = {id(parameter) for norm in norms for parameter in norm.parameters(recurse=False)}
    return frozenset(
        name for name, each in trainable.items() if each.dim() < 2 or id(each) in owned or name.endswith("bias")
    )


class Shards:
    """Divides a flat buffer among ranks: rank r keeps the moments of its slice and updates the weights of its slice.

    The buffer is cut into buckets (start, width). Rank r has the elements [start + r * width, start + (r + 1) * width)
    of each, up to `size`. Every width is a whole number of blocks. A slice is the concatenation of its rank's `spans`:
    `length` elements. capacity: size of a buffer that holds every bucket in full. longest: blocks of the longest slice.
    """

    def __init__(self, size: int, rank: int, world: int) -> None:
        blocks, start = -(-size // BLOCK), 0
        self.rank, self.world, self.block, self._size = rank, world, BLOCK, size
        self.buckets: list[tuple[int, int]] = []
        while start < size:
            left = blocks - start // BLOCK
            width = max(1, min(_BUCKET_BLOCKS, left) // world) * BLOCK
            self.buckets.append((start, width))
            start += world * width
        self.capacity = start
        self.spans = self.spans_of(rank)
        self.length = sum(span.stop - span.start for span in self.spans)
        self.longest = sum(width for _, width in self.buckets) // BLOCK

    @staticmethod
    def divides(size: int, world: int) -> bool:
        """Whether several ranks divide a buffer of `size`, and get at least a block each."""
        return world > 1 and max(world, LEAST) <= -(-size // BLOCK)

    def spans_of(self, rank: int) -> list[slice]:
        firsts = [(start + rank * width, width) for start, width in self.buckets]
        return [slice(first, min(first + width, self._size)) for first, width in firsts if first < self._size]

    def blocks_of(self, rank: int) -> list[slice]:
        """The blocks that `rank` updates, in order."""
        starts = [at for span in self.spans_of(rank) for at in range(span.start, span.stop, BLOCK)]
        return [slice(at, min(at + BLOCK, self._size)) for at in starts]

    def slice_of(self, flat: torch.Tensor) -> torch.Tensor:
        """A copy [length] of this rank's slice of `flat` [size]."""
        return torch.cat([flat[span] for span in self.spans])

    def bucket_of(self, flat: torch.Tensor, bucket: int) -> torch.Tensor:
        """View of a bucket of `flat` [capacity]."""
        start = self.buckets[bucket][0]
        return flat[start : start + self.bucket_size(bucket)]

    def bucket_size(self, bucket: int) -> int:
        return self.world * self.buckets[bucket][1]

    def buckets_of(self, start: int, end: int) -> range:
        """The buckets that hold the elements [start, end)."""
        starts = [first for first, _ in self.buckets]
        return range(bisect_right(starts, start) - 1, bisect_left(starts, end))

    def cut(self, held: torch.Tensor) -> list[torch.Tensor]:
        """Views of the slice `held` [length], one per span."""
        return list(torch.split(held, [span.stop - span.start for span in self.spans]))

    def places_of_blocks(self) -> list[int]:
        """For each block of the buffer its row in a table [world * longest], which lists slice after slice."""
        rows = [(at.start, r * self.longest + i) for r in range(self.world) for i, at in enumerate(self.blocks_of(r))]
        return [row for _, row in sorted(rows)]


class FlatParameters:
    """Owns the storage of a model's trainable parameters and gradients.

    `weights` [size] fp32 is a leaf parameter for the optimizer; backward adds into `gradient` [size] fp32. After
    construction the model's own parameters are views of these. Raises `ValueError` if there are no parameters, or if
    one is not on `device` or not fp32 (small updates would be rounded away: faults F44). capacity: if above the size,
    the elements of `gradient` and of `storage`, which begins with the weights; the rest is zero.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], device: torch.device, capacity: int = 0) -> None:
        if not parameters:
            raise ValueError("the model has no trainable parameters")
        for name, parameter in parameters.items():
            if parameter.dtype != torch.float32 or parameter.device != device:
                msg = f"{name} is {parameter.dtype} on {parameter.device}; trainable weights must be fp32 on {device}"
                raise ValueError(msg)
        self.slots, self.size = layout_of(parameters)
        self.storage = torch.zeros(max(self.size, capacity), device=device)
        self.weights = nn.Parameter(self.storage[: self.size])
        self.gradient = torch.zeros_like(self.storage)
        self.parameters = tuple(parameters.values())
        self._gradients = tuple(self.views(self.gradient).values())
        for view, parameter in zip(self.weight_views().values(), self.parameters, strict=True):
            view.copy_(parameter.detach())
            parameter.data = view  # not the parameter itself: modules and hooks refer to it
        self.attach_gradient()

    def attach_gradient(self) -> None:
        """Make every parameter's `.grad` a view of `gradient` again (user code may have set it to None)."""
        for view, parameter in zip(self._gradients, self.parameters, strict=True):
            if parameter.grad is not view:
                parameter.grad = view

    def attached(self) -> bool:
        """Whether every parameter and gradient is still a view of these buffers. `REPLACED` is the message if not."""
        pairs = zip(self._gradients, self.parameters, strict=True)
        return all(parameter.grad is view for view, parameter in pairs) and self.weights_attached()

    def weights_attached(self) -> bool:
        start = self.weights.data_ptr()
        return all(p.data_ptr() == start + 4 * slot.start for slot, p in zip(self.slots, self.parameters, strict=True))

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        return {slot.name: flat[slot.start : slot.end].view(slot.shape) for slot in self.slots}

    def weight_views(self) -> dict[str, torch.Tensor]:
        return self.views(self.weights.data)

    @property
    def count(self) -> int:
        """The number of trainable elements, without padding."""
        return sum(slot.end - slot.start for slot in self.slots)


@dataclass(frozen=True)
class Range:
    """Elements of the flat weights as a leaf parameter, sharing storage; `held` in the optimizer's buffers."""

    weights: nn.Parameter
    held: slice
    decays: bool


class Master:
    """The optimizer's view of the model: ranges of the flat weights, and `gradient`, whose parts are their `.grad`.

    device: holds copies of the model's buffers; None: shares these buffers (`separate` is false). decayed: the number
    of leading elements with weight decay. shards: the optimizer updates this rank's slice only, and `gradient` is that
    slice [shards.length] instead of the whole [size]. ranges: those with and without weight decay, if not empty.
    """

    def __init__(
        self, parameters: FlatParameters, device: torch.device | None, decayed: int, shards: Shards | None = None
    ) -> None:
        self.weights, self.gradient, size = parameters.weights, parameters.gradient, parameters.size
        self.separate = device is not None
        if self.separate:
            self.weights = nn.Parameter(self.weights.detach().to(device, copy=True))
            self.gradient = torch.zeros(size, device=device)
        elif shards is not None:
            self.gradient = torch.zeros(shards.length, device=self.gradient.device)
        self.device = self.gradient.device
        self.ranges: list[Range] = []
        first, data = 0, self.weights.data
        for span, decays in parted([slice(0, size)] if shards is None else shards.spans, decayed):
            held = slice(first, first + span.stop - span.start)
            weights = self.weights if span == slice(0, size) else nn.Parameter(data[span])
            self.ranges.append(Range(weights, held, decays))
            weights.grad, first = self.gradient[held], held.stop

    def push_weights(self, parameters: FlatParameters) -> None:
        """Copy these weights to the model, if this is a separate copy."""
        if self.separate:
            parameters.weights.data.copy_(self.weights.data)


def parted(spans: Sequence[slice], decayed: int) -> Iterator[tuple[slice, bool]]:
    """`spans` of a flat buffer, cut at `decayed`, with whether their weights decay."""
    for whole in spans:
        border = min(max(whole.start, decayed), whole.stop)
        for span in slice(whole.start, border), slice(border, whole.stop):
            if span.start < span.stop:
                yield span, span.stop <= decayed


def optimizer_of(settings: Optimizer, parameters: Sequence[tuple[nn.Parameter, bool]]) -> torch.optim.Optimizer:
    """The optimizer (seed S12) of these parameters, each with whether it decays."""
    groups: list[dict[str, Any]] = []
    for decays in (True, False):
        members = [parameter for parameter, decaying in parameters if decaying == decays]
        if members:
            groups.append({"params": members, "weight_decay": settings.weight_decay if decays else 0.0})
    if settings.name == "adamw":
        return torch.optim.AdamW(groups, lr=0.0, betas=settings.betas, eps=settings.eps, fused=True)
    # On a GPU it must be fused: only then can the device skip an update (`Replica.gate`).
    fused = True if parameters[0][0].is_cuda else None
    return torch.optim.SGD(groups, lr=0.0, momentum=settings.momentum, fused=fused)


def moments_of(settings: Optimizer) -> tuple[str, ...]:
    """The names of the flat moment tensors that the optimizer can have."""
    return _MOMENTS[settings.name]


def state_names(settings: Optimizer) -> frozenset[str]:
    """The names of all tensors in the optimizer's state after an update."""
    moments = moments_of(settings) if settings.name != "sgd" or settings.momentum else ()
    return frozenset((*moments, *(("step",) if counts_updates(settings) else ())))


def counts_updates(settings: Optimizer) -> bool:
    """Whether the optimizer counts its updates itself, in an fp32 `step`."""
    return settings.name == "adamw"
