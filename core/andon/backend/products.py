"""Products of float32 matrices whose bits are those of any CPU with AVX2, at the speed of oneDNN (`run.portable`).

MKL, which computes torch's products, adds in an order of its own for each kind of CPU; where it is told not to
(`MKL_CBWR=COMPATIBLE`) it takes two to three times as long. oneDNN's kernels add one product after the other, each by a
fused multiply-add, as long as there are not many: then neither the width of a register nor the size of a cache is in
the bits. So products are cut into parts that are as short, by us and not by oneDNN, which cuts by the CPU.

    part[i, j] = fma(a[i, k], b[k, j], ... fma(a[i, 1], b[1, j], fma(a[i, 0], b[0, j], 0)))    for RUN values of k
    (a @ b)[i, j] = (part of the first RUN values [+ bias[j]]) + (part of the next) + ...

That oneDNN adds so nobody promises. It is therefore tried on the CPU at hand before anything is trained.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from andon.console.problems import InputError, Problem

_linear: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.default
RUN = 512
"""Products that are added one after the other. Of more oneDNN makes parts, at AVX2 others than at AVX-512."""
_TRIED = ((2, 512, 2), (3, 384, 1536), (7, 512, 77), (37, 1, 5), (64, 384, 8), (200, 8, 384), (500, 512, 48))
"""Rows, products in each, outputs: with the layouts below, kernels for few and many rows, whole registers and rests."""


@contextmanager
def products_in_order() -> Iterator[None]:
    """Inside, `mm` and `addmm` of float32 matrices on CPUs add in the order above, in the whole process.

    Forward and backward, since autograd calls the same two. Batched products, and those with `out`, are left to MKL.
    Raises `InputError` on a CPU where oneDNN adds otherwise.
    """
    _require_order()
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel", UserWarning)
            for name, made in (("mm", product), ("addmm", _addmm)):
                library.impl(name, made, "CPU", allow_override=True)  # type: ignore[no-untyped-call]
        yield
    finally:
        library._destroy()  # type: ignore[no-untyped-call]


def product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """`a @ b + bias`: [rows, k] by [k, outputs], and [outputs]. Of other dtypes, and of nothing, what torch gives.

    Raises what torch raises for shapes and dtypes that do not fit.
    """
    if not _in_order(a, b):
        made = torch.bmm(a[None], b[None])[0]  # which is not replaced
        return made if bias is None else made + bias
    (rows, columns), outputs, right = a.shape, b.shape[1], b.t()
    if columns <= RUN and rows > 1 and outputs > 1:
        return _linear(a, _dense(right), bias, "none", [], "")
    # A single row or output has kernels of its own, which add otherwise: such a one is computed twice.
    left = a.expand(max(rows, 2), columns)
    right, bias = right.expand(max(outputs, 2), columns), bias if bias is None else bias.expand(max(outputs, 2))
    total = left.new_empty(0)
    for first in range(0, columns, RUN):
        pair = left[:, first : first + RUN], _dense(right[:, first : first + RUN])
        if first == 0:
            total = _linear(*pair, bias if bias is None else bias.contiguous(), "none", [], "")
        else:
            total.add_(_linear(*pair, None, "none", [], ""))
    return total[:rows, :outputs].contiguous()


def _addmm(given: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """`beta * given + alpha * (a @ b)`, as `torch.addmm` has it: what is multiplied by a `beta` of 0 is not read."""
    if alpha == beta == 1 and given.shape == b.shape[1:] and given.dtype == b.dtype and given.is_contiguous():
        return product(a, b, given)
    if not _in_order(a, b):
        wide = given.expand(a.shape[0], b.shape[1])
        return torch.baddbmm(wide[None], a[None], b[None], beta=beta, alpha=alpha)[0]
    made = product(a, b)
    made = made if alpha == 1 else made.mul_(alpha)
    if beta == 0:
        return made
    return made.add_(given.expand(made.shape), alpha=beta)


def _in_order(a: Tensor, b: Tensor) -> bool:
    """Whether these two are float32 matrices that fit and have any element."""
    of_float32 = a.dim() == b.dim() == 2 and a.dtype is b.dtype is torch.float32
    return of_float32 and a.shape[1] == b.shape[0] and a.numel() > 0 and b.numel() > 0


def _dense(matrix: Tensor) -> Tensor:
    """With its rows or its columns one after the other; where neither of a right side are, oneDNN adds otherwise."""
    return matrix if matrix.is_contiguous() or matrix.t().is_contiguous() else matrix.contiguous()


def _require_order() -> None:
    """Raise `InputError` where a product of those tried, at its corners, is not the chain of multiply-adds."""
    drawn = torch.Generator().manual_seed(0)
    pairs = torch.zeros(2, len(_TRIED) * 4 * 4, RUN, dtype=torch.float64)
    found: list[Tensor] = []
    for rows, columns, outputs in _TRIED:
        for turned in range(4):
            a = _drawn(rows, columns, drawn, turned=bool(turned & 1))
            b = _drawn(columns, outputs, drawn, turned=bool(turned & 2))
            made = product(a, b)
            for row, output in ((0, 0), (0, -1), (-1, 0), (-1, -1)):
                pairs[0, len(found), :columns] = a[row]
                pairs[1, len(found), :columns] = b[:, output]
                found.append(made[row, output])
    chain = torch.zeros(len(found))
    for a, b in zip(*pairs.transpose(1, 2), strict=True):
        # The product of two float32 is exact in float64, and the numbers are always these: a sum that is rounded twice
        # to something else would be so everywhere.
        chain = (a * b + chain).float()
    if not torch.equal(chain, torch.stack(found)):
        what = f"needs products that add in one order, which oneDNN of torch {torch.__version__} has not on this CPU"
        raise InputError([Problem("run.portable", what)])


def _drawn(rows: int, columns: int, generator: torch.Generator, *, turned: bool) -> Tensor:
    if turned:
        return torch.randn(columns, rows, generator=generator).t()
    return torch.randn(rows, columns, generator=generator)
