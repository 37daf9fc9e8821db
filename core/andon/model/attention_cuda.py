"""Causal attention for training on a GPU, as Triton kernels whose backward pass adds in one order.

Made for the short rows of text classification, where the kernels that torch keeps for its deterministic mode spend
most of their time outside of the products: keys and values of fewer heads than the queries are read as they are, and
no gradient is summed atomically or through memory. The way of computing is that of FlashAttention-2 (Dao, 2023): the
backward pass computes the probabilities again from the logarithms of their sums; the gradients of queries in one
kernel, those of keys and values in another, each program for its own rows, in the order of the other rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from andon.model.attention import by_place


class Tiles(NamedTuple):
    """How a kernel is cut: rows of its own side, rows of the other side at a time, warps and stages of its pipeline."""

    own: int
    other: int
    warps: int
    stages: int


FORWARD = Tiles(64, 64, 4, 3)
QUERIES = Tiles(64, 64, 4, 2)
KEYS = Tiles(64, 64, 4, 2)
"""Fixed, and not chosen by timing: they are part of the order in which a row's terms are added."""

_LOG2_E = 1.4426950408889634


@triton.jit  # type: ignore[untyped-decorator]
def _forward(  # type: ignore[no-untyped-def]
    Q, K, V, OUT, SUMS, scale,
    q_row, q_head, q_place, k_row, k_head, k_place, v_row, v_head, v_place, o_row, o_head, o_place,
    heads, group, length, SIZE: tl.constexpr, OWN: tl.constexpr, OTHER: tl.constexpr,
):  # fmt: skip
    block = tl.num_programs(1) - 1 - tl.program_id(1)  # those with the most keys first
    row, head = (tl.program_id(0) // heads).to(tl.int64), (tl.program_id(0) % heads).to(tl.int64)
    own, other, size = block * OWN + tl.arange(0, OWN), tl.arange(0, OTHER), tl.arange(0, SIZE)
    Q += row * q_row + head * q_head
    K += row * k_row + head // group * k_head
    V += row * v_row + head // group * v_head
    OUT += row * o_row + head * o_head
    q = tl.load(Q + own[:, None] * q_place + size[None, :], mask=own[:, None] < length, other=0.0)
    highest = tl.full([OWN], float("-inf"), tl.float32)
    total = tl.zeros([OWN], tl.float32)
    out = tl.zeros([OWN, SIZE], tl.float32)
    for start in range(0, tl.minimum(block * OWN + OWN, length), OTHER):
        at = start + other
        k = tl.load(K + at[:, None] * k_place + size[None, :], mask=at[:, None] < length, other=0.0)
        v = tl.load(V + at[:, None] * v_place + size[None, :], mask=at[:, None] < length, other=0.0)
        scores = tl.dot(q, tl.trans(k)) * scale
        scores = tl.where(own[:, None] >= at[None, :], scores, float("-inf"))
        above = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp2(scores - above[:, None])
        shrink = tl.exp2(highest - above)
        total = total * shrink + tl.sum(weights, 1)
        out = out * shrink[:, None] + tl.dot(weights.to(v.dtype), v)
        highest = above
    out = out / total[:, None]
    tl.store(OUT + own[:, None] * o_place + size[None, :], out.to(OUT.dtype.element_ty), mask=own[:, None] < length)
    tl.store(SUMS + tl.program_id(0).to(tl.int64) * length + own, highest + tl.log2(total), mask=own < length)


@triton.jit  # type: ignore[untyped-decorator]
def _backward_queries(  # type: ignore[no-untyped-def]
    Q, K, V, OUT, DOUT, DQ, SUMS, DOTS, scale, factor,
    q_row, q_head, q_place, k_row, k_head, k_place, v_row, v_head, v_place, o_row, o_head, o_place,
    do_row, do_head, do_place, dq_row, dq_head, dq_place,
    heads, group, length, SIZE: tl.constexpr, OWN: tl.constexpr, OTHER: tl.constexpr,
):  # fmt: skip
    block = tl.num_programs(1) - 1 - tl.program_id(1)
    row, head = (tl.program_id(0) // heads).to(tl.int64), (tl.program_id(0) % heads).to(tl.int64)
    own, other, size = block * OWN + tl.arange(0, OWN), tl.arange(0, OTHER), tl.arange(0, SIZE)
    K += row * k_row + head // group * k_head
    V += row * v_row + head // group * v_head
    inside = own[:, None] < length
    q = tl.load(Q + row * q_row + head * q_head + own[:, None] * q_place + size[None, :], mask=inside, other=0.0)
    o = tl.load(OUT + row * o_row + head * o_head + own[:, None] * o_place + size[None, :], mask=inside, other=0.0)
    do = tl.load(DOUT + row * do_row + head * do_head + own[:, None] * do_place + size[None, :], mask=inside, other=0.0)
    flat = tl.program_id(0).to(tl.int64) * length + own
    sums = tl.load(SUMS + flat, mask=own < length, other=float("inf"))
    dots = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(DOTS + flat, dots, mask=own < length)
    dq = tl.zeros([OWN, SIZE], tl.float32)
    for start in range(0, tl.minimum(block * OWN + OWN, length), OTHER):
        at = start + other
        k = tl.load(K + at[:, None] * k_place + size[None, :], mask=at[:, None] < length, other=0.0)
        v = tl.load(V + at[:, None] * v_place + size[None, :], mask=at[:, None] < length, other=0.0)
        weights = tl.exp2(tl.dot(q, tl.trans(k)) * scale - sums[:, None])
        weights = tl.where(own[:, None] >= at[None, :], weights, 0.0)
        slopes = weights * (tl.dot(do, tl.trans(v)) - dots[:, None])
        dq += tl.dot(slopes.to(k.dtype), k)
    dq *= factor
    DQ += row * dq_row + head * dq_head
    tl.store(DQ + own[:, None] * dq_place + size[None, :], dq.to(DQ.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _backward_keys(  # type: ignore[no-untyped-def]
    Q, K, V, DOUT, DK, DV, SUMS, DOTS, scale, factor,
    q_row, q_head, q_place, k_row, k_head, k_place, v_row, v_head, v_place, do_row, do_head, do_place,
    dk_row, dk_head, dk_place, dv_row, dv_head, dv_place,
    heads, group, length, SIZE: tl.constexpr, OWN: tl.constexpr, OTHER: tl.constexpr,
):  # fmt: skip
    # The first keys are seen by the most queries: the most work of the first half, then the least of the second, so
    # that a processor that gets one of each has as much to do as any other.
    turn, half = tl.program_id(1), tl.cdiv(tl.num_programs(1), 2)
    block = tl.where(turn < half, turn, tl.num_programs(1) - 1 - (turn - half))
    row, head = (tl.program_id(0) // heads).to(tl.int64), (tl.program_id(0) % heads).to(tl.int64)
    own, other, size = block * OWN + tl.arange(0, OWN), tl.arange(0, OTHER), tl.arange(0, SIZE)
    inside = own[:, None] < length
    k = tl.load(K + row * k_row + head * k_head + own[:, None] * k_place + size[None, :], mask=inside, other=0.0)
    v = tl.load(V + row * v_row + head * v_head + own[:, None] * v_place + size[None, :], mask=inside, other=0.0)
    dk = tl.zeros([OWN, SIZE], tl.float32)
    dv = tl.zeros([OWN, SIZE], tl.float32)
    first = block * OWN // OTHER * OTHER
    turns = tl.cdiv(length - first, OTHER)
    # One loop over the heads that share these keys and their rows, so that loads run ahead from one head to the next.
    for step in range(group * turns):
        query = head * group + step // turns
        at = first + step % turns * OTHER + other
        there = at[:, None] < length
        q = tl.load(Q + row * q_row + query * q_head + at[:, None] * q_place + size[None, :], mask=there, other=0.0)
        do = tl.load(
            DOUT + row * do_row + query * do_head + at[:, None] * do_place + size[None, :], mask=there, other=0.0
        )
        flat = (row * heads * group + query) * length + at
        sums = tl.load(SUMS + flat, mask=at < length, other=float("inf"))
        dots = tl.load(DOTS + flat, mask=at < length, other=0.0)
        weights = tl.exp2(tl.dot(k, tl.trans(q)) * scale - sums[None, :])
        weights = tl.where(at[None, :] >= own[:, None], weights, 0.0)
        dv += tl.dot(weights.to(do.dtype), do)
        slopes = weights * (tl.dot(v, tl.trans(do)) - dots[None, :])
        dk += tl.dot(slopes.to(q.dtype), q)
    dk *= factor
    DK += row * dk_row + head * dk_head
    DV += row * dv_row + head * dv_head
    tl.store(DK + own[:, None] * dk_place + size[None, :], dk.to(DK.dtype.element_ty), mask=inside)
    tl.store(DV + own[:, None] * dv_place + size[None, :], dv.to(DV.dtype.element_ty), mask=inside)


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, tiles: Tiles = FORWARD
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale q k') v, each place seeing itself and those before it, and the base-2 logarithms of its sums.

    q: [rows, heads, length, size], half precision. k, v: [rows, fewer heads, length, size]; their number of heads
    divides that of q. Returns [rows, heads, length, size], laid out by rows, length, heads; fp32 [rows, heads, length].
    """
    q, k, v = _whole(q), _whole(k), _whole(v)
    rows, heads, length, size = q.shape
    out, sums = by_place(q), q.new_empty((rows, heads, length), dtype=torch.float32)
    _forward[(rows * heads, triton.cdiv(length, tiles.own))](
        q, k, v, out, sums, scale * _LOG2_E, *_strides(q, k, v, out),
        heads, heads // k.shape[1], length, SIZE=size, **_launch(tiles),
    )  # fmt: skip
    return out, sums


def backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, sums: torch.Tensor,
    scale: float, queries: Tiles = QUERIES, keys: Tiles = KEYS,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The gradients of q, k and v for `grad`, that of the first value of `forward`, whose values are out and sums."""
    grad, q, k, v, out = _whole(grad), _whole(q), _whole(k), _whole(v), _whole(out)
    rows, heads, length, size = q.shape
    shared = k.shape[1]
    dq, dk, dv, dots = by_place(q), by_place(k), by_place(v), torch.empty_like(sums)
    _backward_queries[(rows * heads, triton.cdiv(length, queries.own))](
        q, k, v, out, grad, dq, sums, dots, scale * _LOG2_E, scale, *_strides(q, k, v, out, grad, dq),
        heads, heads // shared, length, SIZE=size, **_launch(queries),
    )  # fmt: skip
    _backward_keys[(rows * shared, triton.cdiv(length, keys.own))](
        q, k, v, grad, dk, dv, sums, dots, scale * _LOG2_E, scale, *_strides(q, k, v, grad, dk, dv),
        shared, heads // shared, length, SIZE=size, **_launch(keys),
    )  # fmt: skip
    return dq, dk, dv


def _whole(x: torch.Tensor) -> torch.Tensor:
    """`x` with its last dimension in one piece and its places no further apart than 32 bits count, as they are read."""
    return x if x.stride(3) == 1 and x.shape[2] * x.stride(2) < 2**31 else x.contiguous()


def _strides(*tensors: torch.Tensor) -> list[int]:
    return [stride for tensor in tensors for stride in tensor.stride()[:3]]


def _launch(tiles: Tiles) -> dict[str, Any]:
    return {"OWN": tiles.own, "OTHER": tiles.other, "num_warps": tiles.warps, "num_stages": tiles.stages}
