"""Matrix products with the same bits on any CPU with AVX2, at the speed of oneDNN: for `run.portable`.

MKL, which torch uses for products, adds in another order on each kind of CPU; with `MKL_CBWR=COMPATIBLE` it is two to
three times slower. oneDNN's kernels add one product after the other by fused multiply-adds, if there are not many: then
neither the width of a register nor the size of a cache changes the bits. So sums are cut into parts of that length here
and not by oneDNN, which cuts by the CPU.

    part[i, j] = fma(a[i, k], b[k, j], ... fma(a[i, 1], b[1, j], fma(a[i, 0], b[0, j], 0)))    for RUN values of k
    (a @ b + bias)[i, j] = ((part of the first RUN values + part of the next) + ...) + bias[j]

oneDNN does not promise this order, and the operation that calls it is private to torch. So it is tried on the CPU at
hand before anything is trained.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, library

from andon.console.problems import InputError, Problem

RUN = 384
"""Products that are added one after the other. Of more some oneDNN makes parts: torch 2.11's of 448, where torch 2.13's
first does of 513, at AVX2 others than at AVX-512."""
_FEW = 16
"""For fewer rows than these torch 2.11's has kernels that add otherwise. Others are put beside them."""
FORM = f"parts of {RUN} fused multiply-adds"
"""What a fingerprint says of the bits of products: another order of additions needs another name."""
_KEY = "run.portable"
_TRIED = ((2, RUN, 4000), (3, RUN // 2, 1536), (16, RUN, 77), (37, 1, 5), (64, 384, 8), (200, 8, 384), (500, RUN, 48))
"""Rows, products in each, outputs: with the layouts below, kernels for few and many rows, whole registers and rests."""


@contextmanager
def portable_kernels() -> Iterator[None]:
    """Context manager: in this process `mm` and `addmm` of float32 matrices on CPUs add in the order above.

    Forward and backward, because autograd calls the same two. MKL still computes batched products, products by a
    vector, scaled ones, those in place and those with `out`. oneDNN computes nothing else, because its exact GELU
    and its convolutions depend on the CPU. Raises `InputError` if torch has no oneDNN, or if it adds otherwise on
    this CPU.
    """
    _require_order()
    was_enabled = torch.backends.mkldnn.enabled
    with library._scoped_library("aten", "IMPL") as kernels:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel", UserWarning)
            for name, kernel in (("mm", _mm), ("addmm", _addmm)):
                kernels.impl(name, kernel, "CPU", allow_override=True)
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
        try:
            yield
        finally:
            torch.backends.mkldnn.enabled = was_enabled


def _mm(a: Tensor, b: Tensor) -> Tensor:
    if _in_order(a, b):
        return _product(a, b, None)
    return torch.bmm(a[None], b[None])[0]  # which is not replaced


def _addmm(given: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    if not (alpha == beta == 1 and given.dtype is torch.float32 and _in_order(a, b)):
        wide = given.expand(a.shape[0], b.shape[-1])
        return torch.baddbmm(wide[None], a[None], b[None], beta=beta, alpha=alpha)[0]
    if a.shape[1] <= RUN and given.shape == b.shape[1:] and given.is_contiguous():
        return _product(a, b, given)
    made = _product(a, b, None)
    return made.add_(given.expand(made.shape))


def _in_order(a: Tensor, b: Tensor) -> bool:
    """Whether both are float32 matrices with elements. Raises `RuntimeError` if their shapes do not fit."""
    if not (a.dim() == b.dim() == 2 and a.dtype is b.dtype is torch.float32):
        return False
    if a.shape[1] != b.shape[0]:
        (rows, columns), (others, outputs) = a.shape, b.shape
        msg = f"mat1 and mat2 shapes cannot be multiplied ({rows}x{columns} and {others}x{outputs})"
        raise RuntimeError(msg)
    return a.numel() > 0 and b.numel() > 0


def _product(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """`a @ b + bias`: [rows, k] by [k, outputs], and [outputs]; a bias only for a product of one part."""
    (rows, columns), outputs = a.shape, b.shape[1]
    # oneDNN copies a left one that lies by columns, as the gradient of a weight has it. The other way round are the
    # same products and sums, and the smaller of the two is on the left.
    if outputs < rows and not a.is_contiguous() and a.t().is_contiguous():
        turned = _product(b.t(), a.t(), None).t().clone(memory_format=torch.contiguous_format)
        return turned if bias is None else turned.add_(bias)
    linear = torch.ops.mkldnn._linear_pointwise.default
    right = b.t()
    if rows < _FEW:
        a = torch.cat((a, a.new_zeros(_FEW - rows, columns)))
    # A single output has kernels of its own, which add otherwise: such a one is computed twice.
    if outputs == 1:
        right, bias = right.expand(2, columns), bias if bias is None else bias.repeat(2)
    made: Tensor = linear(a[:, :RUN], _dense(right[:, :RUN]), bias, "none", [], "")
    for first in range(RUN, columns, RUN):
        end = first + RUN
        made.add_(linear(a[:, first:end], _dense(right[:, first:end]), None, "none", [], ""))
    # What is given is alone in its memory, as a product of torch's is.
    return made if rows >= _FEW and outputs > 1 else made[:rows, :outputs].clone(memory_format=torch.contiguous_format)


def _dense(right: Tensor) -> Tensor:
    """`right` contiguous by rows or by columns; otherwise oneDNN has a kernel that adds in another order."""
    return right if right.is_contiguous() or right.t().is_contiguous() else right.contiguous()


def _require_order() -> None:
    """Raise `InputError` if an element of a tried product is not the chain of multiply-adds."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        raise InputError([Problem(_KEY, "needs a torch that is built with oneDNN")])
    generator = torch.Generator().manual_seed(0)
    lefts, rights, biases, found = list[Tensor](), list[Tensor](), list[Tensor](), list[Tensor]()
    for rows, columns, outputs in _TRIED:
        for turned in range(4):
            a = _drawn(rows, columns, generator, turned=bool(turned & 1))
            b = _drawn(columns, outputs, generator, turned=bool(turned & 2))
            bias = _drawn(1, outputs, generator, turned=False)[0]
            made = _product(a, b, bias)
            at = torch.tensor([0, outputs // 3, outputs // 2, outputs - 1])
            for row in {0, rows // 2, rows - 1}:
                pair = torch.nn.functional.pad(torch.cat((a[row][None], b[:, at].t())), (0, RUN - columns))
                lefts.append(pair[:1].expand(len(at), RUN))
                rights.append(pair[1:])
                biases.append(bias[at])
                found.append(made[row, at])
    left, right = torch.cat(lefts).double(), torch.cat(rights).double()
    chain = torch.zeros(len(left))
    for k in range(RUN):
        # The product of two float32 is exact in float64. A sum that is rounded twice to something else would be so on
        # every CPU, since the numbers drawn are the same on all.
        chain = (left[:, k] * right[:, k] + chain).float()
    if not torch.equal(chain + torch.cat(biases), torch.cat(found)):
        what = f"needs products that add in one order, which oneDNN of torch {torch.__version__} has not on this CPU"
        raise InputError([Problem(_KEY, what)])


def _drawn(rows: int, columns: int, generator: torch.Generator, *, turned: bool) -> Tensor:
    if turned:
        return torch.randn(columns, rows, generator=generator).t()
    return torch.randn(rows, columns, generator=generator)
