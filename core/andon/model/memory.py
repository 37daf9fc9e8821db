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
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from andon.model.adapter import trainable_parameters
from andon.model.build import backbone_of, checkpoint_layers, computing, tried, vocabulary_head
from andon.model.causal import loss_of_hidden, packed_inputs
from andon.model.masks import Masking, masked, possible_maskings
from andon.step.flat import FlatParameters, layout_of
from andon.step.plan import rank_leaves
from andon.step.reduce import Node, fold, subtree_roots

_CPU = torch.device("cpu")
_MULTIPROCESSORS = 132
"""Of an H100 or H200: the deterministic backward pass of attention is cut into parts by it."""
_ATTENTION_ROWS = 128
_FP32 = 4
_DIGEST_WORDS = 1 << 16
_MOMENTS = {"adamw": 2, "sgd": 0}
CUDA_UNIT = 512
"""Bytes to which torch's allocator of a GPU rounds up."""
CUDA_WORKSPACE = 64 << 20
"""Bytes of cuBLAS with CUBLAS_WORKSPACE_CONFIG=:4096:8: for the thread of forward passes, and that of backward."""


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
    unit = CUDA_UNIT if on_gpu else 1
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


class StorageWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, `peak` is the most bytes of storages that operations of this thread made or touched, while they live.

    A tensor made before and not touched inside is not counted, nor what a kernel allocates and frees by itself. Dead
    storages are swept out only when their bytes would raise the peak.
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
        if not isinstance(value, Tensor) or value.layout != torch.strided:
            return
        storage = value.untyped_storage()
        known = self._live.get(storage._cdata)
        # The device of a fake tensor costs a call, so only a new storage is asked.
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


@contextmanager
def with_fake_weights(model: nn.Module) -> Iterator[FlatParameters]:
    """Inside, `model` (on the meta device) computes on fake tensors of the CPU; yields its flat trainable buffers.

    The model keeps the fake tensors, so that it is of no use afterwards but for another `with_fake_weights`.
    """
    made: dict[int, Tensor] = {}

    def faked(value: Tensor) -> Tensor:
        empty = torch.empty(value.shape, dtype=value.dtype, device=_CPU)
        return nn.Parameter(empty, requires_grad=value.requires_grad) if isinstance(value, nn.Parameter) else empty

    with FakeTensorMode(allow_non_fake_inputs=True):
        for module in model.modules():
            tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for table in tables:
                for name, value in table.items():
                    if value is not None:
                        table[name] = made.setdefault(id(value), faked(value))
        yield FlatParameters(trainable_parameters(model), _CPU)


def traced_activations(model: nn.Module, rows: int, length: int, kind: str) -> int:
    """Bytes that forward and backward of `rows` rows of `length` tokens add to weights and flat buffers, run eagerly.

    model: inside `with_fake_weights`. kind: of the device, 'cpu' or 'cuda'.
    """
    batch = partial(_batch_of, model, rows, length)
    return _peak(model, kind, lambda: _loss(model, batch(), kind).backward())  # type: ignore[no-untyped-call]


def traced_evaluation(model: nn.Module, rows: int, length: int, kind: str) -> int:
    """Bytes that a forward pass without a graph adds to the weights. model, kind: as `traced_activations` has them."""
    batch = partial(_batch_of, model, rows, length)
    model.eval()
    try:
        with torch.no_grad():
            return _peak(model, kind, lambda: _loss(model, batch(), kind))
    finally:
        model.train()


def _peak(model: nn.Module, kind: str, work: Callable[[], object]) -> int:
    known = [*model.parameters(), *model.buffers()]
    known += [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    watch = StorageWatch(unit=CUDA_UNIT if kind == "cuda" else 1, ignored=known)
    stand_ins: AbstractContextManager[object] = KernelsOfCuda() if kind == "cuda" else nullcontext()
    with stand_ins:
        _masking(model, kind)  # a trial is not part of the trace
        with watch:
            work()
    return watch.peak


def checkpoint_fake_layers(model: nn.Module, kind: str) -> None:
    """As `checkpoint_layers`, for a trace. `backward` leaves the stand-ins, so they are entered anew."""
    checkpoint_layers(model, KernelsOfCuda if kind == "cuda" else nullcontext)


def _batch_of(model: nn.Module, rows: int, length: int) -> dict[str, Tensor]:
    """int64 [rows, length] each: input_ids and attention_mask; for a causal language model packs of one row each, whose
    tokens are all trained."""
    ids = torch.zeros((rows, length), dtype=torch.int64)
    if vocabulary_head(model) is None:
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    names = ("input_ids", "positions", "rows", "weights", "trained")
    return {name: torch.zeros_like(ids) for name in names}


def _loss(model: nn.Module, batch: Mapping[str, Tensor], kind: str) -> Tensor:
    """The loss sum of one micro-batch: of next tokens, or as a classifier has it, for all other tasks."""
    with _passing(model, batch, _masking(model, kind)) as forward:
        output = forward()
    if vocabulary_head(model) is not None:
        return loss_of_hidden(model, output.last_hidden_state, batch, kind).loss_sum
    logits = output.logits.float().flatten(0, -2)
    losses = nn.functional.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.int64), reduction="none")
    return (losses * torch.ones_like(losses)).sum()


@contextmanager
def _passing(model: nn.Module, batch: Mapping[str, Tensor], masking: Masking) -> Iterator[Callable[[], Any]]:
    """Inside, a call is the forward pass of `batch`: of the backbone of a causal language model, of others whole."""
    if vocabulary_head(model) is not None:
        with packed_inputs(model, masking, batch) as given:
            yield partial(backbone_of(model), **given)
        return
    with computing(model, _CPU), masked(model, masking, batch["attention_mask"]) as mask:
        yield partial(model, input_ids=batch["input_ids"], attention_mask=mask)


_found: WeakKeyDictionary[nn.Module, Masking] = WeakKeyDictionary()


def _masking(model: nn.Module, kind: str) -> Masking:
    """The masking that a run most likely uses: on a GPU the first that `model` accepts. Values cannot be compared."""
    *cheaper, last = possible_maskings(model)
    if kind != "cuda":
        return last
    if model not in _found:  # a trial takes as long as a pass
        batch = _batch_of(model, 2, 5)  # no two sizes alike, so that none passes for another
        _found[model] = last
        for masking in cheaper:
            with torch.no_grad(), _passing(model, batch, masking) as forward:
                if isinstance(tried(forward), Exception):
                    continue
            _found[model] = masking
            break
    return _found[model]


class KernelsOfCuda(TorchFunctionMode):
    """Inside, functions whose kernels on a GPU keep something else for the backward pass are replaced by stand-ins."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        stand_in = _STAND_INS.get(func, func)
        return stand_in(*args, **(kwargs or {}))


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Fused: keeps a mask of booleans."""
    if not training or p == 0.0:
        return input
    dropped: Tensor = torch.native_dropout(input, p, True)[0]
    return dropped


def _layer_norm(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """In fp32 under autocast."""
    if torch.is_autocast_enabled("cpu"):
        input = input.float()
    return nn.functional.layer_norm(input, *args, **kwargs)


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *_: Any, **more: Any
) -> Tensor:
    """Fused attention: flash for half precision without a mask, the memory-efficient one otherwise."""
    if torch.is_autocast_enabled("cpu"):
        half = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(half), key.to(half), value.to(half)
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
