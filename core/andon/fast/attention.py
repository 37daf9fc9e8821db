"""Causal attention as a custom torch operation with a gradient. Its Triton kernels (`attention_cuda`) load lazily."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, library

_SIZES = (32, 64, 128)
_HALVES = (torch.bfloat16, torch.float16)
_OLDEST = (8, 0)
"""The lowest compute capability with enough shared memory for the kernels."""


def fits(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether `causal_attention` supports these shapes and types: half precision, head sizes 32, 64 and 128, as many
    keys as queries, and a number of key and value heads that divides the number of query heads."""
    if any(x.dim() != 4 or x.dtype != q.dtype for x in (q, k, v)) or k.shape != v.shape:
        return False
    same_shape = (q.shape[0], *q.shape[2:]) == (k.shape[0], *k.shape[2:]) and q.shape[1] % k.shape[1] == 0
    return same_shape and q.dtype in _HALVES and q.shape[3] in _SIZES


def runs_on(device: torch.device) -> bool:
    """Whether `causal_attention` runs on `device`."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _OLDEST


def supports(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether `causal_attention` supports these tensors and the GPU that they share."""
    return fits(q, k, v) and q.device == k.device == v.device and runs_on(q.device)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, spans: Tensor | None = None) -> Tensor:
    """Causal attention, softmax(scale q k') v, with a deterministic gradient.

    q and the result: [rows, heads, length, size]. k, v: [rows, heads or a divisor of it, length, size]. spans: int32
    [rows, length, 2], contiguous: the start and end (exclusive) of the packed row of each position, both nondecreasing.
    With them a position attends only to its own row, and attention between rows is not computed.
    """
    out: Tensor = torch.ops.andon.causal_attention(q, k, v, spans, scale)[0]
    return out


@library.custom_op("andon::causal_attention", mutates_args=(), device_types="cuda")
def _attention(q: Tensor, k: Tensor, v: Tensor, spans: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    from andon.fast.attention_cuda import forward

    out, lse = _shapes(q, k, v, spans, scale)
    forward(q, k, v, spans, out, lse, scale)
    return out, lse


@library.custom_op("andon::causal_attention_backward", mutates_args=(), device_types="cuda")
def _attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, spans: Tensor | None, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    from andon.fast.attention_cuda import backward

    dq, dk, dv = _gradient_shapes(grad, q, k, v)
    backward(grad, q, k, v, spans, out, lse, dq, dk, dv, scale)
    return dq, dk, dv


def _empty_bshd(x: Tensor) -> Tensor:
    """An empty [rows, heads, length, size] in the memory layout [rows, length, heads, size] of linear projections."""
    rows, heads, length, size = x.shape
    return x.new_empty((rows, length, heads, size)).transpose(1, 2)


@_attention.register_fake
def _shapes(q: Tensor, k: Tensor, v: Tensor, spans: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    return _empty_bshd(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@_attention_backward.register_fake
def _gradient_shapes(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_bshd(q), _empty_bshd(k), _empty_bshd(v)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def _gradient(ctx: Any, grad: Tensor, _of_lse: Tensor) -> tuple[Any, ...]:
    return *torch.ops.andon.causal_attention_backward(grad, *ctx.saved_tensors, ctx.scale), None, None


_attention.register_autograd(_gradient, setup_context=_save_for_backward)
