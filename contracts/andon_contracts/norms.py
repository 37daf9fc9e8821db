"""The 2-norm of a long tensor, to a few roundings of fp32 at any length.

On a CPU, torch's fp32 norm adds the squares of a tensor into 8 running sums. The larger these grow, the more of each
square is rounded away: the norm of 22.7 million normal numbers is off by 1e-3, that of 100 million by 1e-2.

Here squares are added pairwise. Only elementwise operations are used: IEEE arithmetic rounds them alike whatever the
width of a register, and so the bits are the same under AVX2 and AVX-512 and for any number of threads.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_PIECE = 1 << 20
"""Elements that are squared at once. Their fp32 squares (4 MiB) stay in a CPU's cache."""
_SUMS = 64
"""How many partial sums of each piece are read as numbers. Python adds those exactly."""
_LEAST = 1e-20
"""A smaller sum of fp32 squares may have lost squares that are too small for fp32."""


def flat_norm(flat: Tensor) -> Tensor:
    """The 2-norm of `flat` (fp32, 1-dim), 0-dim fp32 on its device. Does not wait for a GPU.

    The relative error is at most 8.5 * 2^-24 at any length. The result is finite if all elements are and their norm
    fits fp32. On a CPU it needs memory for at most 2^20 elements.
    """
    if flat.device.type != "cpu":
        # Torch's GPU kernel sums blocks of 65,536 elements and then the blocks, here in float64, and copies nothing.
        (norm,) = torch._foreach_norm([flat.detach()], 2, dtype=torch.float64)
        return norm.float()
    return torch.tensor(math.sqrt(sum_of_squares(flat)), dtype=torch.float64, device="cpu").float()


def sum_of_squares(tensor: Tensor) -> float:
    """The sum of the squares of a CPU's `tensor` (fp32 or less, any shape), to 15 * 2^-24 of it, beyond fp32 too."""
    total = _pairwise(tensor, torch.float32)
    if _LEAST < total < math.inf:
        return total
    # Squares of fp32 numbers are exact in float64, and none of them overflows or underflows there.
    return _pairwise(tensor, torch.float64)


def _pairwise(tensor: Tensor, dtype: torch.dtype) -> float:
    flat = tensor.detach().reshape(-1)
    bytes_ = min(_PIECE, flat.numel()) * torch.float32.itemsize
    room = torch.empty(max(1, bytes_ // dtype.itemsize), dtype=dtype, device="cpu")
    sums: list[float] = []
    for piece in torch.split(flat, room.numel()):
        squares = room[: piece.numel()]
        if piece.dtype != dtype:
            piece = squares.copy_(piece)
        torch.mul(piece, piece, out=squares)
        while squares.numel() > _SUMS:
            kept = -(-squares.numel() // 2)
            squares[: squares.numel() - kept].add_(squares[kept:])
            squares = squares[:kept]
        sums += squares.tolist()
    return math.fsum(sums)
