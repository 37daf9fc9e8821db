"""The gate's look at a table as one Triton kernel: what `andon.step.gate` does in a dozen operations."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_LEAST = 64


@triton.jit(do_not_specialize=["width", "stride", "count"])  # type: ignore[untyped-decorator]
def _close(table, wanted, rules, held, closed, width, stride, count, limit, LIMITED: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.arange(0, BLOCK)
    inside = place < count
    row = place // width
    column = place % width
    value = tl.load(table + row * stride + column, mask=inside, other=0)
    want = tl.load(wanted + place, mask=inside, other=0)
    rule = tl.load(rules + place, mask=inside, other=0)
    first = tl.load(table + column, mask=inside, other=0)
    before = tl.load(held)
    broken = (rule == 1) & (value != want)
    broken = broken | ((rule == 2) & (value != first))
    broken = broken | ((rule == 3) & ((value & 0x7FF0000000000000) == 0x7FF0000000000000))
    broken = broken | ((rule == 4) & (value != before))
    # The norm stands ahead of what is left of it: the law of one clipping, of rank 0's as all have the same.
    norm = tl.load(table + row * stride + column - 1, mask=inside & (rule == 5), other=0).to(tl.float64, bitcast=True)
    left = value.to(tl.float64, bitcast=True)
    right = norm
    if LIMITED:
        factor = limit / (norm + 1e-6)
        right = tl.where(factor < 1.0, norm * factor, norm)
    close = tl.abs(left - right) <= 1e-4 * right + 1e-30
    broken = broken | ((rule == 5) & (close == 0))
    found = tl.sum(broken.to(tl.int32), axis=0)
    tl.store(closed, 1.0, mask=found > 0)


def close_on_device(
    table: torch.Tensor,
    wanted: torch.Tensor,
    rules: torch.Tensor,
    held: torch.Tensor,
    closed: torch.Tensor,
    limit: float | None,
) -> None:
    """Set `closed` (0-dim fp32) to 1 where an integer of `table` [world, width] breaks its rule; else leave it.

    wanted, rules: int64 [world, width]. held: 0-dim int64. limit: of a clipping.
    """
    world, width = table.shape
    count = world * width
    block = max(_LEAST, triton.next_power_of_2(count))
    bound = 0.0 if limit is None else limit
    _close[(1,)](table, wanted, rules, held, closed, width, table.stride(0), count, bound, limit is not None, block)
