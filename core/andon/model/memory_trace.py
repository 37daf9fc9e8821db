"""Bytes of one micro-batch, found by passes over tensors that have a shape and no memory.

The passes run on fake tensors of the CPU. A GPU's kernels may keep or need something else than the CPU's; stand-ins
here allocate what those allocate, so no GPU is needed to plan for one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from andon.model.adapter import trainable_parameters
from andon.model.build import backbone_of, checkpoint_layers, computing, vocabulary_head
from andon.model.causal import loss_of_hidden, told_apart
from andon.model.masks import Masking, masked, possible_maskings, tried
from andon.model.memory import CUDA_UNIT, StorageWatch
from andon.step.flat import FlatParameters

_CPU = torch.device("cpu")
_MULTIPROCESSORS = 132
"""Of an H100 or H200: the deterministic backward pass of attention is cut into parts by it."""
_ATTENTION_ROWS = 128


@contextmanager
def hollow(model: nn.Module) -> Iterator[FlatParameters]:
    """Inside, `model` (on the meta device) computes on fake tensors of the CPU; yields its flat trainable buffers.

    The model keeps the fake tensors, so that it is of no use afterwards but for another `hollow`.
    """
    made: dict[int, torch.Tensor] = {}

    def faked(value: torch.Tensor) -> torch.Tensor:
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

    model: inside `hollow`. kind: of the device, 'cpu' or 'cuda'.
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


def checkpoint_hollow(model: nn.Module, kind: str) -> None:
    """As `checkpoint_layers`, for a trace. `backward` leaves the stand-ins, so they are entered anew."""
    checkpoint_layers(model, KernelsOfCuda if kind == "cuda" else nullcontext)


def _batch_of(model: nn.Module, rows: int, length: int) -> dict[str, torch.Tensor]:
    """int64 [rows, length] each: input_ids and attention_mask; for a causal language model packs of one row each, whose
    tokens are all trained."""
    ids = torch.zeros((rows, length), dtype=torch.int64)
    if vocabulary_head(model) is None:
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    names = ("input_ids", "positions", "rows", "weights", "trained")
    return {name: torch.zeros_like(ids) for name in names}


def _loss(model: nn.Module, batch: Mapping[str, torch.Tensor], kind: str) -> torch.Tensor:
    """The loss sum of one micro-batch: of next tokens, or as a classifier has it, for all other tasks."""
    with _passing(model, batch, _masking(model, kind)) as forward:
        output = forward()
    if vocabulary_head(model) is not None:
        return loss_of_hidden(model, output.last_hidden_state, batch, kind).loss_sum
    logits = output.logits.float().flatten(0, -2)
    losses = nn.functional.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.int64), reduction="none")
    return (losses * torch.ones_like(losses)).sum()


@contextmanager
def _passing(model: nn.Module, batch: Mapping[str, torch.Tensor], masking: Masking) -> Iterator[Callable[[], Any]]:
    """Inside, a call is the forward pass of `batch`: of the backbone of a causal language model, of others whole."""
    if vocabulary_head(model) is not None:
        with told_apart(model, masking, batch) as given:
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


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """Fused: keeps a mask of booleans."""
    if not training or p == 0.0:
        return input
    dropped: torch.Tensor = torch.native_dropout(input, p, True)[0]
    return dropped


def _layer_norm(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """In fp32 under autocast."""
    if torch.is_autocast_enabled("cpu"):
        input = input.float()
    return nn.functional.layer_norm(input, *args, **kwargs)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *_: Any,
    enable_gqa: bool = False,
    **__: Any,
) -> torch.Tensor:
    """Fused attention: flash for half precision without a mask, the memory-efficient one otherwise."""
    if torch.is_autocast_enabled("cpu"):
        half = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(half), key.to(half), value.to(half)
    flash = attn_mask is None and query.dtype != torch.float32
    if enable_gqa and not flash:
        times = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    bias = None if attn_mask is None else torch.zeros(attn_mask.shape, dtype=query.dtype)
    out: torch.Tensor = _FusedAttention.apply(query, key, value, bias, flash)  # type: ignore[no-untyped-call]
    return out


class _FusedAttention(torch.autograd.Function):
    """[rows, heads, length, size] each; keeps its inputs, its output and a sum for each of its rows."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: Any, flash: bool) -> Any:
        out = torch.empty_like(query)
        sums = torch.empty(query.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, sums, bias)
        ctx.flash = flash
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        query, key, value, _, sums, _ = ctx.saved_tensors
        delta = torch.empty_like(sums)
        room = [delta, *(_flash_room(query, key) if ctx.flash else _efficient_room(query))]
        found = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        del room
        return (*found, None, None)


def _flash_room(query: torch.Tensor, key: torch.Tensor) -> list[torch.Tensor]:
    """Sums of the query's gradient in fp32, and the gradients of repeated heads before they are added up."""
    rows, heads, length, size = query.shape
    parts = -(-_MULTIPROCESSORS // (rows * heads))
    rounded = -(-length // _ATTENTION_ROWS) * _ATTENTION_ROWS
    room = [torch.empty((parts, rows, rounded, heads, size), dtype=torch.float32)]
    if key.shape[1] != heads:
        room += [query.new_empty(rows, key.shape[2], heads, size) for _ in range(2)]
    return room


def _efficient_room(query: torch.Tensor) -> list[torch.Tensor]:
    if query.dtype == torch.float32:
        return []
    return [torch.empty(query.shape, dtype=torch.float32)]


_STAND_INS: Mapping[Any, Callable[..., Any]] = {
    nn.functional.dropout: _dropout,
    torch.dropout: _dropout,
    nn.functional.layer_norm: _layer_norm,
    nn.functional.scaled_dot_product_attention: _attention,
}
