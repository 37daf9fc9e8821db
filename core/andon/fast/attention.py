"""Causal attention as an operation of torch's, with its gradient. Its kernels, in `attention_cuda`, load when used."""

from __future__ import annotations

from typing import Any

import torch
from torch import library

_SIZES = (32, 64, 128)
_HALVES = (torch.bfloat16, torch.float16)
_OLDEST = (8, 0)
"""The compute capability from which a multiprocessor has the shared memory that the kernels take."""


def fits(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether these have shapes and a precision that `causal_attention` takes: half precision, heads of 32, 64 or 128
    values, as many keys as queries, and fewer or as many heads of keys and values, each of which serves as many of the
    queries'."""
    if any(x.dim() != 4 or x.dtype != q.dtype for x in (q, k, v)):
        return False
    return (
        q.dtype in _HALVES
        and q.shape[3] in _SIZES
        and k.shape == v.shape
        and (q.shape[0], *q.shape[2:]) == (k.shape[0], *k.shape[2:])
        and q.shape[1] % k.shape[1] == 0
    )


def runs_on(device: torch.device) -> bool:
    """Whether `device` is a GPU that is not too old for `causal_attention`."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _OLDEST


def supports(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether `causal_attention` takes these where they are: they fit, and all are on a GPU that it runs on."""
    return fits(q, k, v) and all(x.device == q.device for x in (k, v)) and runs_on(q.device)


def causal_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, spans: torch.Tensor | None = None
) -> torch.Tensor:
    """softmax(scale q k') v where each place sees itself and those before it, with a gradient that has one order.

    q: [rows, heads, length, size]. k, v: [rows, heads or a divisor of it, length, size]. Returns the shape of q. Takes
    what `supports` says, and only where it is told to be on a GPU. spans: int32 [rows, length, 2] in one piece, of each
    place where the row that it is packed with others as begins, and where it ends, one behind its last; a place then
    sees none of other rows, and what they would cost is not computed. Both numbers never fall from place to place.
    """
    out: torch.Tensor = torch.ops.andon.causal_attention(q, k, v, spans, scale)[0]
    return out


@library.custom_op(
    "andon::causal_attention",
    mutates_args=(),
    device_types="cuda",
    schema="(Tensor q, Tensor k, Tensor v, Tensor? spans, float scale) -> (Tensor, Tensor)",
)
def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spans: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    from andon.fast.attention_cuda import forward

    # The kernels write into what stands here, so that their module, which needs Triton, needs nothing of this one.
    out, lse = _shapes(q, k, v, spans, scale)
    forward(q, k, v, spans, out, lse, scale)
    return out, lse


@library.custom_op(
    "andon::causal_attention_backward",
    mutates_args=(),
    device_types="cuda",
    schema="(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor? spans, Tensor out, Tensor lse, float scale)"
    " -> (Tensor, Tensor, Tensor)",
)
def _attention_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spans: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from andon.fast.attention_cuda import backward

    dq, dk, dv = _gradient_shapes(grad, q, k, v, spans, out, lse, scale)
    backward(grad, q, k, v, spans, out, lse, dq, dk, dv, scale)
    return dq, dk, dv


def _empty_bshd(x: torch.Tensor) -> torch.Tensor:
    """[rows, heads, length, size] without values, laid out by rows, length, heads, as projections make and take it."""
    rows, heads, length, size = x.shape
    return x.new_empty((rows, length, heads, size)).transpose(1, 2)


@_attention.register_fake
def _shapes(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spans: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return _empty_bshd(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@_attention_backward.register_fake
def _gradient_shapes(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spans: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _empty_bshd(q), _empty_bshd(k), _empty_bshd(v)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def _gradient(ctx: Any, grad: torch.Tensor, _of_lse: torch.Tensor) -> tuple[Any, ...]:
    return *torch.ops.andon.causal_attention_backward(grad, *ctx.saved_tensors, ctx.scale), None, None


_attention.register_autograd(_gradient, setup_context=_remember)
