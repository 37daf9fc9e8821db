"""The plan of bytes of one replica (F-HET-002), and traces of what a micro-batch needs.

The plan follows the step: frozen weights; a flat buffer each for trained weights, their gradient and each moment;
partial sums of the fixed tree; and the most that any one phase needs on top.

A trace is a pass over fake tensors, which have a shape and no memory, on the CPU. A GPU's kernels may keep or need
something else than the CPU's; stand-ins allocate what those allocate, so no GPU is needed to plan for one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from andon.model.adapter import trainable_parameters
from andon.model.batches import Shape
from andon.model.build import backbone_of, checkpoint_layers, computing, try_pass, vocabulary_head
from andon.model.causal import loss_of_hidden
from andon.model.masks import Masking, masked, packed_inputs, possible_maskings
from andon.step.flat import FlatParameters, layout_of
from andon.step.plan import rank_leaves
from andon.step.reduce import subtree_roots

_CPU = torch.device("cpu")
_MULTIPROCESSORS = 132
"""Of an H100 or H200: the deterministic backward pass of attention is cut into parts by it."""
_ATTENTION_ROWS = 128
_FP32, _DIGEST_WORDS = 4, 1 << 16
_MOMENTS = {"adamw": 2, "sgd": 0}
_CUDA_UNIT = 512
"""Bytes to which torch's allocator of a GPU rounds up."""
_CUDA_WORKSPACE = 64 << 20
"""Bytes of cuBLAS with CUBLAS_WORKSPACE_CONFIG=:4096:8: for the thread of forward passes, and that of backward."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that one replica needs.

    Held all the time: base (frozen weights and buffers), weights and gradient (the flat trainable buffers), moments,
    partials (buffers of the tree), ramp (the digest's table of positions), workspace (of products on a GPU).
    Phases, of which the largest counts: activations (one micro-batch, forward and backward), finite (the check for NaN
    and Inf), digest (its chunks), reduction (what is sent, received and gathered), evaluation (a forward pass).
    graphs: held by CUDA graphs while they do not run. outside: bytes that torch does not count, as a device's context.
    """

    base: int = 0
    weights: int = 0
    gradient: int = 0
    moments: int = 0
    partials: int = 0
    ramp: int = 0
    activations: int = 0
    finite: int = 0
    digest: int = 0
    reduction: int = 0
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

    trainable: all fp32. optimizer: 'adamw' or 'sgd'; others are a `ValueError`. activations: bytes of the largest
    micro-batch. kind: of the device, 'cpu' or 'cuda'.
    """
    if optimizer not in _MOMENTS:
        msg = f"unknown optimizer {optimizer!r}; there are {', '.join(_MOMENTS)}"
        raise ValueError(msg)
    on_gpu = kind == "cuda"
    unit = _CUDA_UNIT if on_gpu else 1
    still = [*(p for p in model.parameters() if not p.requires_grad), *model.buffers()]
    frozen = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in still}
    size = layout_of(trainable)[1] * _FP32
    moments = _MOMENTS[optimizer] + (optimizer == "sgd" and momentum != 0.0)
    runs = rank_leaves(micro_batches, world_size)
    roots = [len(subtree_roots((0, micro_batches), run.start, run.stop)) for run in runs]
    width = -(-size // world_size)
    # Roots sent and slices received, the sum of this rank's slice, and the gathered whole.
    reduction = max(roots) * size + sum(roots) * width + 2 * width + size
    return MemoryPlan(
        base=sum(-(-held // unit) * unit for held in frozen.values()),
        weights=size,
        gradient=size,
        moments=moments * size,
        partials=size * max(kept_partials(micro_batches, run) for run in runs),
        ramp=0 if on_gpu else 8 * _DIGEST_WORDS,
        activations=activations,
        finite=0 if on_gpu else size + 3 * (size // _FP32),
        digest=0 if on_gpu else 16 * min(_DIGEST_WORDS, max([size, *frozen.values()]) // 8),
        reduction=reduction if world_size > 1 else 0,
        workspace=_CUDA_WORKSPACE if on_gpu else 0,
    )


def kept_partials(micro_batches: int, run: range) -> int:
    """The most buffers of the gradient's size that a rank with the leaves `run` holds beside the gradient: sums of
    earlier subtrees, and in the current one of n leaves a left summand at each level, ceil(log2 n)."""
    roots = subtree_roots((0, micro_batches), run.start, run.stop)
    return max((done + max(1, (end - start - 1).bit_length()) for done, (start, end) in enumerate(roots)), default=0)


class StorageWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, `peak` is the most bytes of storages that operations of this thread made or touched, while they live.

    It does not count a tensor made before and not touched inside, nor what a kernel allocates and frees by itself.
    """

    def __init__(self, unit: int = 1, ignored: Iterable[Tensor] = ()) -> None:
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
        self._see(tree_leaves((args, kwargs)))
        result = func(*args, **kwargs)
        self._see(tree_leaves(result))
        if self._bytes > self.peak:
            held = self._live.items()
            self._live = {pointer: each for pointer, each in held if not each[0].expired()}  # type: ignore[no-untyped-call]
            self._bytes = sum(size for _, size in self._live.values())
            self.peak = max(self.peak, self._bytes)
        return result

    def _see(self, values: Iterable[object]) -> None:
        for value in values:
            if not isinstance(value, Tensor) or value.layout != torch.strided:
                continue
            storage = value.untyped_storage()
            known = self._live.get(storage._cdata)
            # The device of a fake tensor costs a call, so it is read for new storages alone.
            if known is None and (storage._cdata in self._ignored or value.device.type == "meta"):
                continue
            size = -(-storage.nbytes() // self._unit) * self._unit
            weakly, before = known or (StorageWeakRef(storage), 0)  # type: ignore[no-untyped-call]
            self._live[storage._cdata] = (weakly, size)
            self._bytes += size - before


def traced_bytes(
    model: nn.Module, kind: str, trained: Shape, scored: Shape, *, checkpointing: bool = False
) -> tuple[int, int]:
    """Bytes that an eager micro-batch of `trained` adds to weights and flat buffers, forward and backward, and bytes
    that a forward pass of `scored` without a graph adds to the weights.

    model: on the meta device. It keeps fake tensors, so it is of no use afterwards but for another trace. kind: of the
    device, 'cpu' or 'cuda'.
    """
    kernels: Callable[[], AbstractContextManager[object]] = KernelsOfCuda if kind == "cuda" else nullcontext
    causal = vocabulary_head(model) is not None
    packs = ("input_ids", "positions", "rows", "weights", "trained")  # of one row each, whose tokens are all trained
    names = packs if causal else ("input_ids", "attention_mask")

    @contextmanager
    def passing(shape: Shape, masking: Masking) -> Iterator[tuple[dict[str, Tensor], Callable[[], Any]]]:
        batch = {name: torch.full(shape, int(name == "attention_mask")) for name in names}
        if causal:
            with packed_inputs(model, masking, batch) as given:
                yield batch, partial(backbone_of(model), **given)
        else:
            with computing(model, _CPU), masked(model, masking, batch["attention_mask"]) as mask:
                yield batch, partial(model, input_ids=batch["input_ids"], attention_mask=mask)

    def loss(shape: Shape) -> Tensor:
        with passing(shape, masking) as (batch, forward):
            output = forward()
        if causal:
            return loss_of_hidden(model, output.last_hidden_state, batch, kind).loss_sum
        logits = output.logits.float().flatten(0, -2)  # as a classifier has it, for all other tasks
        losses = nn.functional.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.int64), reduction="none")
        return (losses * torch.ones_like(losses)).sum()

    def peak(work: Callable[[], object]) -> int:
        known = [*model.parameters(), *model.buffers()]
        known += [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        watch = StorageWatch(_CUDA_UNIT if kind == "cuda" else 1, known)
        with kernels(), watch:
            work()
        return watch.peak

    with FakeTensorMode(allow_non_fake_inputs=True):
        made: dict[int, Tensor] = {}
        for table in (table for module in model.modules() for table in (module._parameters, module._buffers)):
            for name, value in table.items():
                if value is not None:
                    empty = torch.empty(value.shape, dtype=value.dtype, device=_CPU)
                    learns = isinstance(value, nn.Parameter)
                    fake = nn.Parameter(empty, requires_grad=value.requires_grad) if learns else empty
                    table[name] = made.setdefault(id(value), fake)  # type: ignore[assignment]
        FlatParameters(trainable_parameters(model), _CPU)
        model.eval()
        *cheaper, masking = possible_maskings(model)
        # A run on a GPU takes the first that holds; values cannot be compared here. The sizes of the trial differ, so
        # that none passes for another.
        for each in cheaper if kind == "cuda" else ():
            with kernels(), torch.no_grad(), passing((2, 5), each) as (_, forward):
                accepted = not isinstance(try_pass(forward), Exception)
            if accepted:
                masking = each
                break
        with torch.no_grad():
            evaluation = peak(lambda: loss(scored))
        model.train()
        if checkpointing:  # the backward pass leaves the stand-ins, so the second pass enters them anew
            checkpoint_layers(model, kernels)
        return peak(lambda: loss(trained).backward()), evaluation  # type: ignore[no-untyped-call]


class KernelsOfCuda(TorchFunctionMode):
    """Inside, functions whose kernels on a GPU keep something else for the backward pass are replaced by stand-ins."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _STAND_INS.get(func, func)(*args, **(kwargs or {}))


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Fused: keeps a mask of booleans."""
    dropped: Tensor = torch.native_dropout(input, p, True)[0] if training and p else input
    return dropped


def _layer_norm(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """In fp32 under autocast."""
    return nn.functional.layer_norm(input.float() if torch.is_autocast_enabled("cpu") else input, *args, **kwargs)


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *_: Any, **more: Any
) -> Tensor:
    """Fused attention: flash for half precision without a mask, the memory-efficient one otherwise."""
    if torch.is_autocast_enabled("cpu"):
        query, key, value = (each.to(torch.get_autocast_dtype("cpu")) for each in (query, key, value))
    flash = attn_mask is None and query.dtype != torch.float32
    if more.get("enable_gqa") and not flash:
        times = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    bias = None if attn_mask is None else torch.zeros(attn_mask.shape, dtype=query.dtype)
    out: Tensor = _FusedAttention.apply(query, key, value, bias, flash)  # type: ignore[no-untyped-call]
    return out


class _FusedAttention(torch.autograd.Function):
    """[rows, heads, length, size] each; keeps its inputs, its output and a sum for each of its rows."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Any, flash: bool) -> Any:
        out = torch.empty_like(query)
        sums = torch.empty(query.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, sums, bias)
        ctx.flash = flash
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        query, key, value, _, sums, _ = ctx.saved_tensors
        rows, heads, length, size = query.shape
        room = [torch.empty_like(sums)]
        if ctx.flash:  # the query's gradient in fp32, and the gradients of repeated heads before they are added
            parts, blocks = -(-_MULTIPROCESSORS // (rows * heads)), -(-length // _ATTENTION_ROWS)
            room.append(torch.empty((parts, rows, blocks * _ATTENTION_ROWS, heads, size), dtype=torch.float32))
            if key.shape[1] != heads:
                room += [query.new_empty(rows, key.shape[2], heads, size) for _ in range(2)]
        elif query.dtype != torch.float32:
            room.append(torch.empty(query.shape, dtype=torch.float32))
        found = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        del room
        return (*found, None, None)


_STAND_INS: Mapping[Any, Callable[..., Any]] = {
    nn.functional.dropout: _dropout,
    torch.dropout: _dropout,
    nn.functional.layer_norm: _layer_norm,
    nn.functional.scaled_dot_product_attention: _attention,
}
