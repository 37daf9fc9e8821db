"""Causal attention for training on a GPU: Triton kernels with a deterministic backward pass.

They are meant for short rows, alone or in packs, for which torch's deterministic kernels spend most of their time
outside of the matrix products. Grouped keys and values are not repeated, and gradients need no atomic additions and no
partial sums in memory. The method is FlashAttention-2 (Dao, 2023): the backward pass recomputes the probabilities from
the log-sum-exp, with one kernel for the gradients of queries and one for those of keys and values.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

FORWARD = {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3}
BACKWARD = FORWARD | {"num_stages": 2}
"""A program computes BLOCK_M queries (or keys) and reads BLOCK_N keys (or queries) at a time. Not autotuned: the block
sizes decide the order in which a row's terms are added."""
_LOG2_E = 1.4426950408889634
LOWEST: tl.constexpr = tl.constexpr(-1e30)
"""A finite number below every score."""


@triton.jit  # type: ignore[untyped-decorator]
def _forward(  # type: ignore[no-untyped-def]
    Q, K, V, OUT, LSE, scale_log2,
    stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs,
    stride_ob, stride_oh, stride_os,
    SPANS, heads, group, length,
    SIZE: tl.constexpr, PACKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """OUT = causal softmax(scale q k') v, and LSE, its base-2 log-sum-exp, for BLOCK_M queries of one head.
    Q, OUT: [rows, heads, length, SIZE]. K, V: [rows, heads / group, length, SIZE]. LSE: [rows, heads, length].
    SPANS, if PACKED: [rows, length, 2]."""
    block = tl.num_programs(1) - 1 - tl.program_id(1)  # blocks with the most keys first
    row, head = (tl.program_id(0) // heads).to(tl.int64), (tl.program_id(0) % heads).to(tl.int64)
    offs_m, offs_d = block * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, SIZE)
    Q += row * stride_qb + head * stride_qh
    K += row * stride_kb + head // group * stride_kh
    V += row * stride_vb + head // group * stride_vh
    OUT += row * stride_ob + head * stride_oh
    inside = offs_m[:, None] < length
    q = tl.load(Q + offs_m[:, None] * stride_qs + offs_d[None, :], mask=inside, other=0.0)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    out = tl.zeros([BLOCK_M, SIZE], tl.float32)
    first = 0
    if PACKED:
        SPANS += row * length * 2
        starts = tl.load(SPANS + 2 * offs_m, mask=offs_m < length, other=0)
        first = tl.load(SPANS + 2 * block * BLOCK_M) // BLOCK_N * BLOCK_N
    for start_n in range(first, tl.minimum(block * BLOCK_M + BLOCK_M, length), BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        k = tl.load(K + offs_n[:, None] * stride_ks + offs_d[None, :], mask=offs_n[:, None] < length, other=0.0)
        v = tl.load(V + offs_n[:, None] * stride_vs + offs_d[None, :], mask=offs_n[:, None] < length, other=0.0)
        scores = tl.dot(q, tl.trans(k)) * scale_log2
        scores = tl.where(offs_m[:, None] >= offs_n[None, :], scores, float("-inf"))
        if PACKED:
            scores = tl.where(starts[:, None] <= offs_n[None, :], scores, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(scores, 1))
        if PACKED:  # before a query's row begins its largest score is -inf, which would give NaN
            m_new = tl.maximum(m_new, LOWEST)
        p = tl.exp2(scores - m_new[:, None])
        alpha = tl.exp2(m_i - m_new)
        l_i = l_i * alpha + tl.sum(p, 1)
        out = out * alpha[:, None] + tl.dot(p.to(v.dtype), v)
        m_i = m_new
    out = out / l_i[:, None]
    tl.store(OUT + offs_m[:, None] * stride_os + offs_d[None, :], out.to(OUT.dtype.element_ty), mask=inside)
    tl.store(LSE + tl.program_id(0).to(tl.int64) * length + offs_m, m_i + tl.log2(l_i), mask=offs_m < length)


@triton.jit  # type: ignore[untyped-decorator]
def _backward_queries(  # type: ignore[no-untyped-def]
    Q, K, V, OUT, DOUT, DQ, LSE, DELTA, scale_log2, scale,
    stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs,
    stride_ob, stride_oh, stride_os, stride_dob, stride_doh, stride_dos, stride_dqb, stride_dqh, stride_dqs,
    SPANS, heads, group, length,
    SIZE: tl.constexpr, PACKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """DQ, and DELTA, the sums of OUT * DOUT that `_backward_keys` reads, for BLOCK_M queries of one head.
    Q, OUT, DOUT, DQ: [rows, heads, length, SIZE]. K, V: with heads / group. LSE, DELTA: as Q, without SIZE.
    SPANS: as in `_forward`."""
    block = tl.num_programs(1) - 1 - tl.program_id(1)
    row, head = (tl.program_id(0) // heads).to(tl.int64), (tl.program_id(0) % heads).to(tl.int64)
    offs_m, offs_d = block * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, SIZE)
    K += row * stride_kb + head // group * stride_kh
    V += row * stride_vb + head // group * stride_vh
    inside = offs_m[:, None] < length
    q_ptr = Q + row * stride_qb + head * stride_qh
    q = tl.load(q_ptr + offs_m[:, None] * stride_qs + offs_d[None, :], mask=inside, other=0.0)
    o_ptr = OUT + row * stride_ob + head * stride_oh
    o = tl.load(o_ptr + offs_m[:, None] * stride_os + offs_d[None, :], mask=inside, other=0.0)
    do_ptr = DOUT + row * stride_dob + head * stride_doh
    do = tl.load(do_ptr + offs_m[:, None] * stride_dos + offs_d[None, :], mask=inside, other=0.0)
    flat = tl.program_id(0).to(tl.int64) * length + offs_m
    lse = tl.load(LSE + flat, mask=offs_m < length, other=float("inf"))
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(DELTA + flat, delta, mask=offs_m < length)
    dq = tl.zeros([BLOCK_M, SIZE], tl.float32)
    first = 0
    if PACKED:
        SPANS += row * length * 2
        starts = tl.load(SPANS + 2 * offs_m, mask=offs_m < length, other=0)
        first = tl.load(SPANS + 2 * block * BLOCK_M) // BLOCK_N * BLOCK_N
    for start_n in range(first, tl.minimum(block * BLOCK_M + BLOCK_M, length), BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        k = tl.load(K + offs_n[:, None] * stride_ks + offs_d[None, :], mask=offs_n[:, None] < length, other=0.0)
        v = tl.load(V + offs_n[:, None] * stride_vs + offs_d[None, :], mask=offs_n[:, None] < length, other=0.0)
        p = tl.exp2(tl.dot(q, tl.trans(k)) * scale_log2 - lse[:, None])
        p = tl.where(offs_m[:, None] >= offs_n[None, :], p, 0.0)
        if PACKED:
            p = tl.where(starts[:, None] <= offs_n[None, :], p, 0.0)
        ds = p * (tl.dot(do, tl.trans(v)) - delta[:, None])
        dq += tl.dot(ds.to(k.dtype), k)
    dq *= scale
    DQ += row * stride_dqb + head * stride_dqh
    tl.store(DQ + offs_m[:, None] * stride_dqs + offs_d[None, :], dq.to(DQ.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _backward_keys(  # type: ignore[no-untyped-def]
    Q, K, V, DOUT, DK, DV, LSE, DELTA, scale_log2, scale,
    stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs,
    stride_dob, stride_doh, stride_dos, stride_dkb, stride_dkh, stride_dks, stride_dvb, stride_dvh, stride_dvs,
    SPANS, kv_heads, group, length,
    SIZE: tl.constexpr, PACKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """DK and DV for BLOCK_M keys of one head, summed over the `group` heads of queries that share it.
    K, V, DK, DV: [rows, kv_heads, length, SIZE]. Q, DOUT: with kv_heads * group. LSE, DELTA: as Q, without SIZE.
    SPANS: as in `_forward`."""
    # The first keys have the most queries. The first half of the blocks runs in order of falling work, the second half
    # in order of rising work, so that a multiprocessor with a block of each gets about as much work as any other.
    turn, half = tl.program_id(1), tl.cdiv(tl.num_programs(1), 2)
    block = tl.where(turn < half, turn, tl.num_programs(1) - 1 - (turn - half))
    row, kv_head = (tl.program_id(0) // kv_heads).to(tl.int64), (tl.program_id(0) % kv_heads).to(tl.int64)
    offs_m, offs_d = block * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, SIZE)
    inside = offs_m[:, None] < length
    k_ptr = K + row * stride_kb + kv_head * stride_kh
    k = tl.load(k_ptr + offs_m[:, None] * stride_ks + offs_d[None, :], mask=inside, other=0.0)
    v_ptr = V + row * stride_vb + kv_head * stride_vh
    v = tl.load(v_ptr + offs_m[:, None] * stride_vs + offs_d[None, :], mask=inside, other=0.0)
    dk = tl.zeros([BLOCK_M, SIZE], tl.float32)
    dv = tl.zeros([BLOCK_M, SIZE], tl.float32)
    first = block * BLOCK_M // BLOCK_N * BLOCK_N
    end = length
    if PACKED:
        SPANS += row * length * 2
        end = tl.load(SPANS + 2 * (tl.minimum(block * BLOCK_M + BLOCK_M, length) - 1) + 1)
    turns = tl.cdiv(end - first, BLOCK_N)
    # One loop over query heads and their rows, so that loads are prefetched across heads.
    for step in range(group * turns):
        q_head_index = kv_head * group + step // turns
        offs_n = first + step % turns * BLOCK_N + tl.arange(0, BLOCK_N)
        valid = offs_n[:, None] < length
        q_ptr = Q + row * stride_qb + q_head_index * stride_qh
        q = tl.load(q_ptr + offs_n[:, None] * stride_qs + offs_d[None, :], mask=valid, other=0.0)
        do_ptr = DOUT + row * stride_dob + q_head_index * stride_doh
        do = tl.load(do_ptr + offs_n[:, None] * stride_dos + offs_d[None, :], mask=valid, other=0.0)
        flat = (row * kv_heads * group + q_head_index) * length + offs_n
        lse = tl.load(LSE + flat, mask=offs_n < length, other=float("inf"))
        delta = tl.load(DELTA + flat, mask=offs_n < length, other=0.0)
        p = tl.exp2(tl.dot(k, tl.trans(q)) * scale_log2 - lse[None, :])
        p = tl.where(offs_n[None, :] >= offs_m[:, None], p, 0.0)
        if PACKED:
            starts = tl.load(SPANS + 2 * offs_n, mask=offs_n < length, other=0)
            p = tl.where(starts[None, :] <= offs_m[:, None], p, 0.0)
        dv += tl.dot(p.to(do.dtype), do)
        ds = p * (tl.dot(v, tl.trans(do)) - delta[None, :])
        dk += tl.dot(ds.to(q.dtype), q)
    dk *= scale
    DK += row * stride_dkb + kv_head * stride_dkh
    DV += row * stride_dvb + kv_head * stride_dvh
    tl.store(DK + offs_m[:, None] * stride_dks + offs_d[None, :], dk.to(DK.dtype.element_ty), mask=inside)
    tl.store(DV + offs_m[:, None] * stride_dvs + offs_d[None, :], dv.to(DV.dtype.element_ty), mask=inside)


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spans: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor,
    scale: float,
) -> None:  # fmt: skip
    """Write `out`, the causal softmax(scale q k') v, and `lse`, its base-2 log-sum-exp.

    q, k, v, spans: as in `causal_attention`. out: like q, contiguous in the last dimension. lse: fp32 [rows, heads,
    length].
    """
    q, k, v = _addressable(q), _addressable(k), _addressable(v)
    rows, heads, length, size = q.shape
    with torch.cuda.device_of(q):  # Triton launches on the current GPU
        _forward[(rows * heads, triton.cdiv(length, FORWARD["BLOCK_M"]))](
            q, k, v, out, lse, scale * _LOG2_E, *_strides(q, k, v, out),
            q if spans is None else spans, heads, heads // k.shape[1], length,
            SIZE=size, PACKED=spans is not None, **FORWARD,
        )  # fmt: skip


def backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spans: torch.Tensor | None,
    out: torch.Tensor, lse: torch.Tensor, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, scale: float,
) -> None:  # fmt: skip
    """Write dq, dk and dv, the gradients of q, k and v. grad: the gradient of `out`. out, lse: written by `forward`."""
    grad, q, k, v, out = _addressable(grad), _addressable(q), _addressable(k), _addressable(v), _addressable(out)
    rows, heads, length, size = q.shape
    kv_heads, blocks, delta = k.shape[1], triton.cdiv(length, BACKWARD["BLOCK_M"]), torch.empty_like(lse)
    packs = q if spans is None else spans
    how = {"SIZE": size, "PACKED": spans is not None, **BACKWARD}
    with torch.cuda.device_of(q):  # Triton launches on the current GPU
        _backward_queries[(rows * heads, blocks)](
            q, k, v, out, grad, dq, lse, delta, scale * _LOG2_E, scale, *_strides(q, k, v, out, grad, dq),
            packs, heads, heads // kv_heads, length, **how,
        )  # fmt: skip
        _backward_keys[(rows * kv_heads, blocks)](
            q, k, v, grad, dk, dv, lse, delta, scale * _LOG2_E, scale, *_strides(q, k, v, grad, dk, dv),
            packs, kv_heads, heads // kv_heads, length, **how,
        )  # fmt: skip


def _addressable(x: torch.Tensor) -> torch.Tensor:
    """`x` as the kernels read it: contiguous in the last dimension, with 32-bit offsets within a head; else a copy."""
    return x if x.stride(3) == 1 and x.shape[2] * x.stride(2) < 2**31 else x.contiguous()


def _strides(*tensors: torch.Tensor) -> list[int]:
    return [stride for tensor in tensors for stride in tensor.stride()[:3]]
