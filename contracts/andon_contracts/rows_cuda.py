"""Digests of rows as Triton kernels: the CPU's values, in one launch each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_COLUMNS = 256
_ROWS = 64


@triton.jit
def _mix(z):  # type: ignore[no-untyped-def]
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit(do_not_specialize=["columns", "stride"])  # type: ignore[untyped-decorator]
def _row_sums(values, lengths, out, columns, stride, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + row)
    total = tl.zeros([BLOCK], dtype=tl.uint64)
    for first in range(0, columns, BLOCK):
        place = first + tl.arange(0, BLOCK).to(tl.int64)
        inside = (place < columns) & (place < length)
        word = tl.load(values + row * stride + place, mask=inside, other=0).to(tl.uint64, bitcast=True)
        total += tl.where(inside, _mix(word + place.to(tl.uint64) * 0x9E3779B97F4A7C15), 0)
    ending = _mix(length.to(tl.uint64, bitcast=True) + 0x9E3779B97F4A7C15)
    tl.store(out + row, _mix(tl.sum(total, axis=0) + ending).to(tl.int64, bitcast=True))


@triton.jit  # type: ignore[untyped-decorator]
def _bound_sums(rows, runs, out, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    run = tl.program_id(0)
    start = tl.load(runs + 3 * run)
    first = tl.load(runs + 3 * run + 1)
    count = tl.load(runs + 3 * run + 2)
    total = tl.zeros([BLOCK], dtype=tl.uint64)
    for turn in range(0, count, BLOCK):
        place = turn + tl.arange(0, BLOCK).to(tl.int64)
        inside = place < count
        row = tl.load(rows + start + place, mask=inside, other=0).to(tl.uint64, bitcast=True)
        total += tl.where(inside, _mix(row + _mix((first + place + 1).to(tl.uint64))), 0)
    tl.store(out + run, tl.sum(total, axis=0).to(tl.int64, bitcast=True))


def row_digests_on_device(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """int64 [rows] on the device: what `andon_contracts.digest.row_digests` gives of these."""
    rows, columns = values.shape
    values, lengths = values.contiguous(), lengths.contiguous()
    out = torch.empty(rows, dtype=torch.int64, device=values.device)
    if rows:
        _row_sums[(rows,)](values, lengths, out, columns, columns, _COLUMNS)
    return out


def bound_sums_on_device(rows: torch.Tensor, runs: torch.Tensor) -> torch.Tensor:
    """int64 [n] on the device: by run, the sum modulo 2^64 of mix(row + mix(place + 1)) over its rows.

    rows: int64 [all rows]. runs: int64 [n, 3]: where a run starts in `rows`, the place of its first row, its length.
    """
    out = torch.empty(runs.shape[0], dtype=torch.int64, device=rows.device)
    if runs.shape[0]:
        _bound_sums[(runs.shape[0],)](rows.contiguous(), runs.contiguous(), out, _ROWS)
    return out
