"""The gate's check of a table as one Triton kernel, instead of the dozen torch operations in `andon.step.message`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from andon_contracts.laws.update import FACTOR_STEP, NORM_FLOOR, Reduced

_LEAST = 64


@triton.jit(do_not_specialize=["world", "width", "stride", "count"])  # type: ignore[untyped-decorator]
def _close(  # type: ignore[no-untyped-def]
    table,
    wanted,
    rules,
    held,
    closed,
    world,
    width,
    stride,
    count,
    limit,
    tolerance,
    floor,
    LIMITED: tl.constexpr,
    MAJORITY: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):
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
    if MAJORITY:
        # The majority value of the previous column; in a tie, that of the lowest rank. If all values equal rank 0's, as
        # in every healthy step, no votes are counted.
        asks = inside & ((rule == 5) | (rule == 6))
        ahead = table + column - 1
        most = tl.load(ahead, mask=asks, other=0)
        mine = tl.load(ahead + row * stride, mask=asks, other=0)
        if tl.sum((mine != most).to(tl.int32), axis=0) > 0:
            best = tl.zeros([BLOCK], dtype=tl.int32)
            for one in range(world):
                proposed = tl.load(ahead + one * stride, mask=asks, other=0)
                votes = tl.zeros([BLOCK], dtype=tl.int32)
                for other in range(world):
                    votes += (tl.load(ahead + other * stride, mask=asks, other=0) == proposed).to(tl.int32)
                most = tl.where(votes > best, proposed, most)
                best = tl.maximum(votes, best)
        broken = broken | ((rule == 6) & (value != most))
        # `laws.CLIP`: the norm after clipping.
        norm = most.to(tl.float64, bitcast=True)
        left = value.to(tl.float64, bitcast=True)
        right = norm
        if LIMITED:
            factor = limit / (norm + 1e-6)
            right = tl.where(factor < 1.0, norm * factor, norm)
        close = tl.abs(left - right) <= tolerance * right + norm * STEP + floor
        broken = broken | ((rule == 5) & (close == 0))
    violations = tl.sum(broken.to(tl.int32), axis=0)
    tl.store(closed, 1.0, mask=violations > 0)


def close_on_device(
    table: torch.Tensor,
    wanted: torch.Tensor,
    rules: torch.Tensor,
    held: torch.Tensor,
    closed: torch.Tensor,
    want: Reduced | None = None,
) -> None:
    """Set `closed` (0-dim fp32) to 1 if an integer of `table` [world, width] breaks its rule; else leave it.

    wanted, rules: int64 [world, width]. held: 0-dim int64. want: the clipping limits, for `Rule.MAJORITY` and
    `Rule.CLIPPED`.
    """
    world, width = table.shape
    count = world * width
    # One program for the whole table: one launch, and no concurrent writes to the flag.
    block = max(_LEAST, triton.next_power_of_2(count))
    sizes = (world, width, table.stride(0), count)
    norms = Reduced() if want is None else want
    bounds = (norms.limit or 0.0, norms.norm_tolerance, NORM_FLOOR)
    limited, majority = norms.limit is not None, want is not None
    with torch.cuda.device_of(table):  # Triton launches on the current GPU
        # STEP is a constexpr: as an argument, Triton would round it to fp32, in which it is denormal.
        _close[(1,)](table, wanted, rules, held, closed, *sizes, *bounds, limited, majority, block, FACTOR_STEP)
