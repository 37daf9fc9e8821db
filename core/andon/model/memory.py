"""The plan of bytes of one replica (F-HET-002), and a count of the storages that live.

The plan follows the step: frozen weights; a flat buffer each for trained weights, their gradient and each moment;
partial sums of the fixed tree; and the most that any one phase needs on top. The count knows nothing of the plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from andon.step.flat import layout_of
from andon.step.plan import rank_leaves
from andon.step.tree import Node, fold, subtree_roots

_FP32 = 4
_DIGEST_WORDS = 1 << 16
_MOMENTS = {"adamw": 2, "sgd": 0}
CUDA_UNIT = 512
"""Bytes to which torch's allocator of a GPU rounds up."""
CUDA_WORKSPACE = 64 << 20
"""Bytes of cuBLAS with CUBLAS_WORKSPACE_CONFIG=:4096:8: for the thread of forward passes, and that of backward."""


def rounded(size: int) -> int:
    """Bytes that `size` bytes take on a GPU."""
    return -(-size // CUDA_UNIT) * CUDA_UNIT


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that one replica needs.

    Held all the time: base (frozen weights and buffers), weights and gradient (the flat trainable buffers), moments,
    partials (buffers of the tree), ramp (the digest's table of positions), workspace (of products on a GPU).
    Phases, of which the largest counts: activations (one micro-batch, forward and backward), finite (the check for NaN
    and Inf), digest (its chunks), reduction (what is sent, received and gathered), evaluation (a forward pass).
    graphs: held by CUDA graphs while they do not run. outside: what torch does not count, as a device's context.
    """

    base: int
    weights: int
    gradient: int
    moments: int
    partials: int
    ramp: int
    activations: int
    finite: int
    digest: int
    reduction: int
    evaluation: int = 0
    workspace: int = 0
    graphs: int = 0
    outside: int = 0

    @property
    def total(self) -> int:
        """The most bytes of tensors at once."""
        lasting = self.base + self.weights + self.gradient + self.moments + self.partials + self.ramp + self.workspace
        return lasting + max(self.activations, self.finite, self.digest, self.reduction, self.evaluation)

    @property
    def needed(self) -> int:
        """Bytes that must be free before the run starts. No run is refused for its evaluation."""
        return replace(self, evaluation=0).total + self.graphs + self.outside

    def as_dict(self) -> dict[str, int]:
        """Plain values for a record, with `total` and `needed`."""
        parts = {part.name: getattr(self, part.name) for part in fields(self)}
        return parts | {"total": self.total, "needed": self.needed}


def plan_bytes(
    model: nn.Module,
    trainable: Mapping[str, nn.Parameter],
    optimizer: str,
    micro_batches: int,
    activations: int,
    *,
    world_size: int = 1,
    momentum: float = 0.0,
    kind: str = "cpu",
) -> MemoryPlan:
    """The plan of the rank that needs most, with `micro_batches` leaves over `world_size` ranks.

    trainable: in canonical order, all fp32. optimizer: 'adamw' or 'sgd'. activations: bytes of the largest micro-batch.
    kind: of the device, 'cpu' or 'cuda'. Raises `ValueError` for an unknown optimizer.
    """
    if optimizer not in _MOMENTS:
        msg = f"unknown optimizer {optimizer!r}; there are {', '.join(_MOMENTS)}"
        raise ValueError(msg)
    on_gpu = kind == "cuda"
    still = [*(p for p in model.parameters() if not p.requires_grad), *model.buffers()]
    frozen = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in still}
    size = layout_of(trainable)[1] * _FP32
    moments = _MOMENTS[optimizer] + (optimizer == "sgd" and momentum != 0.0)
    runs = rank_leaves(micro_batches, world_size)
    return MemoryPlan(
        base=sum(rounded(held) if on_gpu else held for held in frozen.values()),
        weights=size,
        gradient=size,
        moments=moments * size,
        partials=size * max(kept_partials(micro_batches, run) for run in runs),
        ramp=0 if on_gpu else 8 * _DIGEST_WORDS,
        activations=activations,
        finite=0 if on_gpu else size + 3 * (size // _FP32),
        digest=0 if on_gpu else 16 * min(_DIGEST_WORDS, max([size, *frozen.values()]) // 8),
        reduction=_reduction_bytes(size, micro_batches, world_size),
        workspace=CUDA_WORKSPACE if on_gpu else 0,
    )


def kept_partials(micro_batches: int, run: range) -> int:
    """Buffers of the gradient's size that a rank with the leaves `run` holds at once beside the gradient.

    Counted by walking the tree as the step does. All leaves on one rank need at most ceil(log2 M).
    """
    buffer, live, most = object(), 0, 0

    def leaf(_: int) -> object:
        return buffer

    def keep(value: object) -> object:
        nonlocal live, most
        if value is not buffer:
            return value
        live += 1
        most = max(most, live)
        return object()

    def add(left: object, right: object) -> object:
        nonlocal live
        live -= right is not buffer
        return left

    whole: Node = (0, micro_batches)
    for root in subtree_roots(whole, run.start, run.stop):
        keep(fold(root, leaf, add, keep))
    return most


def _reduction_bytes(size: int, micro_batches: int, world_size: int) -> int:
    """Roots sent and slices received, the sum of this rank's slice, and the gathered whole."""
    if world_size == 1:
        return 0
    roots = [
        len(subtree_roots((0, micro_batches), run.start, run.stop)) for run in rank_leaves(micro_batches, world_size)
    ]
    width = -(-size // world_size)
    return max(roots) * size + sum(roots) * width + 2 * width + size


class StorageWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, `peak` is the most bytes of storages that operations of this thread made or touched, while they live.

    A tensor made before and not touched inside is not counted, nor what a kernel allocates and frees by itself. Dead
    storages are swept out only when their bytes would raise the peak.
    """

    def __init__(self, unit: int = 1, ignored: Iterable[torch.Tensor] = ()) -> None:
        """unit: bytes to which each storage is rounded up. ignored: tensors whose storages do not count."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._unit = unit
        self._ignored = {tensor.untyped_storage()._cdata for tensor in ignored}
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self._bytes = 0
        self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for value in tree_leaves((args, kwargs)):
            self._see(value)
        result = func(*args, **kwargs)
        for value in tree_leaves(result):
            self._see(value)
        if self._bytes > self.peak:
            dead = []
            for pointer in reversed(self._live):  # the youngest die soonest
                storage, size = self._live[pointer]
                if storage.expired():  # type: ignore[no-untyped-call]
                    dead.append(pointer)
                    self._bytes -= size
                    if self._bytes <= self.peak:
                        break
            for pointer in dead:
                del self._live[pointer]
            self.peak = max(self.peak, self._bytes)
        return result

    def _see(self, value: object) -> None:
        if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
            return
        storage = value.untyped_storage()
        known = self._live.get(storage._cdata)
        # A fake tensor is asked for its device by a call like any other, so only what is new is.
        if known is None and (storage._cdata in self._ignored or value.device.type == "meta"):
            return
        size = -(-storage.nbytes() // self._unit) * self._unit
        if known is None:
            weakly = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            self._live[storage._cdata] = (weakly, size)
            self._bytes += size
        elif known[1] != size:
            self._live[storage._cdata] = (known[0], size)
            self._bytes += size - known[1]
