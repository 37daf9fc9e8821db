"""The memory plan of one replica (F-HET-002), and traces of a micro-batch's memory.

The plan follows the step: frozen weights; a flat buffer each for trained weights, their gradient and each moment;
partial sums of the fixed reduction tree; and the largest need of any one phase, such as an audit, on top.

A trace is a pass on the CPU over fake tensors, which have a shape but no memory. A GPU's kernels may allocate other
buffers than the CPU's. Stand-ins with the allocations of GPU kernels make it possible to plan without a GPU.
"""

from __future__ import annotations

import sys
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
from andon.model.build import backbone_of, checkpoint_layers, computing, try_pass, vocabulary_head
from andon.model.causal import loss_of_hidden
from andon.model.masks import Masking, Shape, masked, packed_inputs, possible_maskings
from andon.model.quantize import packed_sizes, unpacked_bytes
from andon.step import flat
from andon.step.flat import FlatParameters, Shards, layout_of
from andon.step.plan import rank_leaves
from andon.step.reduce import subtree_roots

_CPU = torch.device("cpu")
_MULTIPROCESSORS = 132
"""Of an H100 or H200: the deterministic backward pass of flash attention splits its work by this number."""
_ATTENTION_ROWS = 128
_FP32, _DIGEST_WORDS = 4, 1 << 16
_MOMENTS = {"adamw": 2, "sgd": 0}
_CUDA_UNIT = 512
"""torch's CUDA allocator rounds sizes up to multiples of this many bytes."""
_CUDA_WORKSPACE = 64 << 20
"""Bytes of cuBLAS workspaces with CUBLAS_WORKSPACE_CONFIG=:4096:8, for the forward and the backward thread."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that one replica needs.

    Permanent: base (frozen weights and buffers), weights and gradient (the flat trainable buffers), moments (if ranks
    divide the optimizer, those of the longest slice and its gradient), partials (partial sums of the tree), ramp (the
    digest's table of positions), workspace (of cuBLAS; CUDA graphs have another). Phases, of which the largest counts:
    activations (one micro-batch, forward and backward) or recomputed (blocks that an audit gathers), each beside audit
    (the sums that an audited step keeps); digest (chunks of a digest or a norm), reduction (its send, receive and
    gather buffers), evaluation (a forward pass). graphs: private pools of idle CUDA graphs, which torch counts as
    reserved but not as allocated. outside: bytes outside torch's allocator, such as the device's context. In host
    memory: loaded (the base before it is quantized), saving (a divided optimizer's moments, gathered by rank 0).
    """

    base: int = 0
    weights: int = 0
    gradient: int = 0
    moments: int = 0
    partials: int = 0
    ramp: int = 0
    audit: int = 0
    activations: int = 0
    recomputed: int = 0
    digest: int = 0
    reduction: int = 0
    evaluation: int = 0
    workspace: int = 0
    graphs: int = 0
    outside: int = 0
    loaded: int = 0
    saving: int = 0

    @property
    def total(self) -> int:
        """Peak bytes of tensors, as torch counts them: permanent ones and the largest phase."""
        permanent = self.base + self.weights + self.gradient + self.moments + self.partials + self.ramp
        permanent += self.workspace * (2 if self.graphs else 1)
        step = self.audit + max(self.activations, self.recomputed)
        return permanent + max(step, self.digest, self.reduction, self.evaluation)

    @property
    def needed(self) -> int:
        """Bytes that must be free before the run starts, without `evaluation`: no run is refused for it."""
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
    audited: int = 0,
    packed: Iterable[Tensor] = (),
    divided: bool = False,
) -> MemoryPlan:
    """The plan of the rank that needs most memory, with `micro_batches` leaves over `world_size` ranks.

    trainable: fp32 parameters. activations: bytes of the largest micro-batch. kind: 'cpu' or 'cuda'. audited: the
    micro-batches of each rank that an audit recomputes; 0: no step is audited. packed: the frozen weights that are
    quantized. divided: ranks divide the optimizer if it is large enough.
    """
    on_gpu = kind == "cuda"
    unit = _CUDA_UNIT if on_gpu else 1
    untrained = [*(p for p in model.parameters() if not p.requires_grad), *model.buffers()]
    frozen = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in untrained}
    base = sum(-(-nbytes // unit) * unit for nbytes in frozen.values())
    saved, unpacked = 0, 0
    for weight in packed:
        saved += -(-weight.nbytes // unit) * unit - sum(-(-nbytes // unit) * unit for nbytes in packed_sizes(weight))
        unpacked = max(unpacked, unpacked_bytes(weight))
    elements, transient = layout_of(trainable)[1], unpacked
    shards = Shards(elements, 0, world_size) if divided and Shards.divides(elements, world_size) else None
    size = (elements if shards is None else shards.capacity) * _FP32
    moments = _MOMENTS[optimizer] + (optimizer == "sgd" and momentum != 0.0)
    runs = rank_leaves(micro_batches, world_size)
    roots = [len(subtree_roots((0, micro_batches), run.start, run.stop)) for run in runs]
    width = -(-size // world_size)
    # Roots to send, slices to receive, the sum of this rank's slice, and the gathered gradient.
    reduction = max(roots) * size + sum(roots) * width + 2 * width + size
    if shards is not None:  # of one bucket
        width = max(each for _, each in shards.buckets) * _FP32
        reduction = max(roots) * world_size * width + sum(roots) * width + 2 * width
        transient += reduction if on_gpu else 0  # during the last backward pass
    partials = [kept_partials(micro_batches, run, divided=shards is not None) for run in runs]
    audited = min(audited, len(runs[0]))
    levels = (len(runs[0]) - 1).bit_length()
    # The sums that an auditor cannot compute: at most one a level for each of the micro-batches that it recomputes.
    copied = min(audited * levels, len(runs[0]) - audited)
    # While the tree is summed again, a sum a level, some in spare buffers of the first time; before, a block per rank.
    copied += max(0, min(audited, levels) - partials[0] + roots[0])
    # An audit gathers a sum block by block, and of a divided update weights, gradient and moments, which it copies.
    block, blocks = _FP32 * flat.BLOCK, 2 * world_size if shards is None else (world_size + 3) * (2 + moments)
    return MemoryPlan(
        base=base - saved,
        weights=size,
        gradient=size,
        moments=moments * size if shards is None else (moments + 1) * shards.length * _FP32,
        partials=size * max(partials),
        ramp=0 if on_gpu else 8 * _DIGEST_WORDS,
        audit=size * copied if audited else 0,
        activations=activations + transient,
        recomputed=blocks * min(size, block) if audited and (copied or shards is not None) else 0,
        digest=0 if on_gpu else max(16 * min(_DIGEST_WORDS, max([size, *frozen.values()]) // 8), min(size, block)),
        reduction=reduction if world_size > 1 else 0,
        evaluation=unpacked,
        workspace=_CUDA_WORKSPACE if on_gpu else 0,
        loaded=base if saved else 0,
        saving=moments * size if shards is not None else 0,
    )


def kept_partials(micro_batches: int, run: range, *, divided: bool = False) -> int:
    """Without the gradient itself, the peak number of gradient-sized buffers of a rank with the leaves `run`: sums of
    finished subtrees, and in the current one of n leaves a left summand per level, ceil(log2 n). The sum of a single
    leaf is copied, but if the optimizer is `divided`, the last subtree's is not."""
    levels = [(end - start - 1).bit_length() for start, end in subtree_roots((0, micro_batches), run.start, run.stop)]
    copied = [max(1, each) for each in levels[:-1]] + [max(each, not divided) for each in levels[-1:]]
    return max((done + each for done, each in enumerate(copied)), default=0)


class StorageWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context manager: `peak` is the most bytes of live storages that operations of this thread created or used.

    Tensors that exist before and are not used inside do not count, nor do a kernel's temporary buffers.
    """

    def __init__(self, unit: int = 1, ignored: Iterable[Tensor] = ()) -> None:
        """unit: storages are rounded up to multiples of this many bytes. ignored: tensors that do not count."""
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
        self._track(tree_leaves((args, kwargs)))
        result = func(*args, **kwargs)
        self._track(tree_leaves(result))
        if self._bytes > self.peak:
            entries = self._live.items()
            self._live = {pointer: each for pointer, each in entries if not each[0].expired()}  # type: ignore[no-untyped-call]
            self._bytes = sum(size for _, size in self._live.values())
            self.peak = max(self.peak, self._bytes)
        return result

    def _track(self, values: Iterable[object]) -> None:
        for value in values:
            if not isinstance(value, Tensor) or value.layout != torch.strided:
                continue
            storage = value.untyped_storage()
            known = self._live.get(storage._cdata)
            # Reading a fake tensor's device is slow, so it is read for new storages only.
            if known is None and (storage._cdata in self._ignored or value.device.type == "meta"):
                continue
            size = -(-storage.nbytes() // self._unit) * self._unit
            weakly, before = known or (StorageWeakRef(storage), 0)  # type: ignore[no-untyped-call]
            self._live[storage._cdata] = (weakly, size)
            self._bytes += size - before


def traced_bytes(
    model: nn.Module,
    kind: str,
    trained: Shape,
    scored: Shape,
    *,
    terms: int = sys.maxsize,
    checkpointing: bool = False,
    retained: bool = False,
) -> tuple[int, int]:
    """Peak bytes beyond weights and flat buffers: of an eager forward and backward pass of shape `trained`, and of a
    forward pass of shape `scored` without a graph.

    model: on the meta device. It is left with fake weights, usable only for another trace. kind: 'cpu' or 'cuda'.
    terms: the most tokens of a pack that are trained. retained: the backward pass frees no saved activation, as that of
    a compiled graph, whose inputs they are.
    """
    kernels: Callable[[], AbstractContextManager[object]] = KernelsOfCuda if kind == "cuda" else nullcontext
    causal = vocabulary_head(model) is not None
    packs = ("input_ids", "positions", "rows", "weights", "trained")  # one row per pack
    names = packs if causal else ("input_ids", "attention_mask")

    @contextmanager
    def passing(shape: Shape, masking: Masking) -> Iterator[tuple[dict[str, Tensor], Callable[[], Any]]]:
        sizes = {"trained": (shape[0], min(shape[1], terms))}
        batch = {name: torch.full(sizes.get(name, shape), int(name == "attention_mask")) for name in names}
        if causal:
            with packed_inputs(model, masking, batch) as inputs:
                yield batch, partial(backbone_of(model), **inputs)
        else:
            with computing(model, _CPU), masked(model, masking, batch["attention_mask"]) as mask:
                yield batch, partial(model, input_ids=batch["input_ids"], attention_mask=mask)

    def loss(shape: Shape) -> Tensor:
        with passing(shape, masking) as (batch, forward):
            output = forward()
        if causal:
            return loss_of_hidden(model, output.last_hidden_state, batch, kind).loss_sum
        logits = output.logits.float().flatten(0, -2)  # a classifier's loss stands for all other tasks' losses
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
        fakes: dict[int, Tensor] = {}
        for table in (table for module in model.modules() for table in (module._parameters, module._buffers)):
            for name, value in table.items():
                if value is not None:
                    empty = torch.empty(value.shape, dtype=value.dtype, device=_CPU)
                    is_weight = isinstance(value, nn.Parameter)
                    fake = nn.Parameter(empty, requires_grad=value.requires_grad) if is_weight else empty
                    table[name] = fakes.setdefault(id(value), fake)  # type: ignore[assignment]
        FlatParameters(trainable_parameters(model), _CPU)
        model.eval()
        *cheaper, masking = possible_maskings(model)
        # A run on a GPU chooses by comparing values, which fake tensors lack: take the first that does not raise. The
        # trial's rows and length differ, so that a swapped dimension raises.
        for each in cheaper if kind == "cuda" else ():
            with kernels(), torch.no_grad(), passing((2, 5), each) as (_, forward):
                accepted = not isinstance(try_pass(forward), Exception)
            if accepted:
                masking = each
                break
        with torch.no_grad():
            evaluation = peak(lambda: loss(scored))
        model.train()
        if checkpointing:  # autograd recomputes outside of the function mode, so the recomputation enters it
            checkpoint_layers(model, kernels)
        return peak(lambda: loss(trained).backward(retain_graph=retained)), evaluation  # type: ignore[no-untyped-call]


class KernelsOfCuda(TorchFunctionMode):
    """Replaces functions whose GPU kernels save other tensors for the backward pass by stand-ins that save the same."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _STAND_INS.get(func, func)(*args, **(kwargs or {}))


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    dropped: Tensor = torch.native_dropout(input, p, True)[0] if training and p else input
    return dropped


def _layer_norm(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return nn.functional.layer_norm(input.float() if torch.is_autocast_enabled("cpu") else input, *args, **kwargs)


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *_: Any, **more: Any
) -> Tensor:
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
    """Inputs [rows, heads, length, size]. Saves the inputs, the output and one fp32 log-sum per query."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Any, flash: bool) -> Any:
        out = torch.empty_like(query)
        sums = torch.empty(query.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, sums, bias)
        ctx.flash = flash
        return out

    @staticmethod
    def backward(ctx: Any, *_grads: Any) -> Any:
        query, key, value, _, sums, _ = ctx.saved_tensors
        rows, heads, length, size = query.shape
        buffers = [torch.empty_like(sums)]
        if ctx.flash:  # the query's gradient in fp32, and per query head those of shared keys and values
            parts, blocks = -(-_MULTIPROCESSORS // (rows * heads)), -(-length // _ATTENTION_ROWS)
            buffers.append(torch.empty((parts, rows, blocks * _ATTENTION_ROWS, heads, size), dtype=torch.float32))
            if key.shape[1] != heads:
                buffers += [query.new_empty(rows, key.shape[2], heads, size) for _ in range(2)]
        elif query.dtype != torch.float32:
            buffers.append(torch.empty(query.shape, dtype=torch.float32))
        gradients = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        del buffers
        return (*gradients, None, None)


_STAND_INS: Mapping[Any, Callable[..., Any]] = {
    nn.functional.dropout: _dropout,
    torch.dropout: _dropout,
    nn.functional.layer_norm: _layer_norm,
    nn.functional.scaled_dot_product_attention: _attention,
}
