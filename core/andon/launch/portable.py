"""`run.portable`: the same bits on every x86 CPU with AVX2.

torch and MKL choose kernels by CPU. Two environment variables limit both to kernels that every CPU with AVX2 has. A
process reads them once, at its first kernel and its first matrix product.

With `MKL_CBWR=COMPATIBLE` MKL's matrix products take two to three times as long, so oneDNN computes them instead. Its
kernels add the products of a short sum one by one with fused multiply-adds: then neither register width nor cache size
changes the bits. Longer sums are split into short parts here, because oneDNN would split them differently by CPU.

    part[i, j] = fma(a[i, k], b[k, j], ... fma(a[i, 1], b[1, j], fma(a[i, 0], b[0, j], 0)))    for RUN values of k
    (a @ b + bias)[i, j] = ((part of the first RUN values + part of the next) + ...) + bias[j]

oneDNN does not promise this order, and torch's operation that calls it is private. So the order is tested on this CPU
before training.

The launcher sets the variables and does not load torch, so functions import it.
"""

from __future__ import annotations

import ctypes
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from andon.config.schema import Run
from andon.console.messages import InputError, Problem
from andon_contracts.fingerprint import environment

if TYPE_CHECKING:
    from torch import Tensor

SETTINGS = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "COMPATIBLE"}
"""The variables, and the values with which bits do not depend on the type of CPU."""
RUN = 384
"""The number of products in a part. oneDNN splits longer sums: in torch 2.11 into parts of 448, in torch 2.13 from 513
products on, and differently with AVX2 and AVX-512."""
FORM = f"parts of {RUN} fused multiply-adds"
"""The fingerprint's name for this order of additions. A new order needs a new name."""
_KEY = "run.portable"
_REMEDY = "run.portable=false trains without"
_ASK_BRANCH, _COMPATIBLE = 1, 3
"""MKL_CBWR_BRANCH and MKL_CBWR_COMPATIBLE of mkl_types.h."""
_IN_EFFECT = ("AVX2", _COMPATIBLE)
"""The capability of torch and the branch of MKL if both variables took effect."""
_FEW = 16
"""torch 2.11's kernels for fewer rows add in another order, so smaller matrices are padded with zero rows."""
_TRIED = ((2, RUN, 4000), (3, RUN // 2, 1536), (16, RUN, 77), (37, 1, 5), (64, 384, 8), (200, 8, 384), (500, RUN, 48))
"""Tested rows, products and outputs: in all layouts, kernels for few and many rows, full and partial registers."""


def obstacles() -> list[Problem]:
    """Reasons why this machine cannot compute portable bits: a CPU without AVX2, variables with other values."""
    problems = []
    if "avx2" not in str(environment()["instructions"]).split():
        # torch would trust the variable and crash.
        problems.append(Problem(_KEY, "needs a CPU with AVX2, which this one does not say it has"))
    for name, value in SETTINGS.items():
        if (set_to := os.environ.get(name, value)) != value:
            what = f"is {set_to!r} in the environment, {_KEY} needs {value!r}; unset one of the two"
            problems.append(Problem(name, what))
    return problems


def can_take_effect(run: Run) -> bool:
    """Whether `run` can still train portably in this process: not after torch has computed with other kernels.

    If so and torch is loaded, this call fixes torch's choice, and the variables stay in the environment.
    """
    if run.backend != "inline" or "torch" not in sys.modules:
        return True
    with portable_environment(run.model_copy(update={"portable": True})):
        return _capability_and_branch() == _IN_EFFECT


@contextmanager
def portable_environment(run: Run) -> Iterator[None]:
    """Context manager: with `run.portable`, set the variables for new processes, and for this one if torch is unused.

    On exit the environment is restored, except in a process that trained itself: torch keeps the values it read, so the
    variables stay, and later records of the environment are correct. Raises `InputError` for `obstacles`.
    """
    if not run.portable:
        yield
        return
    if problems := obstacles():
        raise InputError(problems)
    added = [name for name in SETTINGS if name not in os.environ]
    os.environ.update(SETTINGS)
    try:
        yield
    finally:
        if not (run.backend == "inline" and "torch" in sys.modules and _capability_and_branch() == _IN_EFFECT):
            for name in added:
                os.environ.pop(name, None)


def require_in_effect() -> None:
    """Raise `InputError` if torch or MKL do not use the variables of `portable_environment` in this process."""
    actual = _capability_and_branch()
    if actual == _IN_EFFECT:
        return
    if actual[1] is None:
        raise InputError.at(_KEY, f"needs a torch that is built with MKL; {_REMEDY}")
    settings = " ".join(f"{name}={value}" for name, value in SETTINGS.items())
    what = (
        f"comes too late: torch has computed in this process before, with {actual[0]}; start the program with "
        f"{settings}, or train in ranks, which are processes of their own (run.backend=gloo)"
    )
    raise InputError.at(_KEY, what)


def _capability_and_branch() -> tuple[str, int | None]:
    """torch's CPU capability and MKL's branch: None without MKL, 0 if not queried, `_COMPATIBLE` if it has no query."""
    import torch

    capability = torch.backends.cpu.get_cpu_capability()
    if not torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
        return capability, None
    if capability != _IN_EFFECT[0]:
        return capability, 0  # a query fixes MKL's branch, and a plain run may follow
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        return capability, int(ctypes.CDLL(str(library)).mkl_serv_cbwr_get(_ASK_BRANCH))
    except (OSError, AttributeError):
        return capability, _COMPATIBLE


@contextmanager
def portable_kernels() -> Iterator[None]:
    """Context manager: in this process `mm` and `addmm` of float32 matrices on CPUs add in the order above.

    This covers forward and backward, because autograd calls the same two. MKL still computes batched, matrix-vector and
    scaled products, those in place and those with `out`. oneDNN is off for all else, because its exact GELU and its
    convolutions depend on the CPU. Raises `InputError` if torch has no oneDNN, or if it adds in another order on this
    CPU.
    """
    import torch
    from torch import library

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
    # `bmm` is not replaced.
    return _product(a, b, None) if _in_order(a, b) else a[None].bmm(b[None])[0]


def _addmm(added: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    if not (alpha == beta == 1 and added.dtype is a.dtype and _in_order(a, b)):
        wide = added.expand(a.shape[0], b.shape[-1])
        return wide[None].baddbmm(a[None], b[None], beta=beta, alpha=alpha)[0]
    if a.shape[1] <= RUN and added.shape == b.shape[1:] and added.is_contiguous():
        return _product(a, b, added)
    product = _product(a, b, None)
    return product.add_(added.expand(product.shape))


def _in_order(a: Tensor, b: Tensor) -> bool:
    import torch

    if not (a.dim() == b.dim() == 2 and a.dtype is b.dtype is torch.float32):
        return False
    if a.shape[1] != b.shape[0]:
        (rows, columns), (others, outputs) = a.shape, b.shape
        raise RuntimeError(f"mat1 and mat2 shapes cannot be multiplied ({rows}x{columns} and {others}x{outputs})")
    return a.numel() > 0 and b.numel() > 0


def _product(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """`a @ b + bias`: [rows, k] by [k, outputs], and [outputs]. A bias requires k <= RUN."""
    import torch

    rows, outputs = a.shape[0], b.shape[1]
    # oneDNN copies a column-major left matrix, as the gradient of a weight has. The transposed product has the same
    # sums, so the smaller matrix goes to the left, unless it has so few rows that it must be padded.
    other_way = _FEW <= outputs < rows or rows < _FEW <= outputs
    turned = other_way and not a.is_contiguous() and a.t().is_contiguous()
    left, right, added = (b.t(), a, None) if turned else (a, b.t(), bias)
    (rows, columns), outputs = left.shape, right.shape[0]
    if rows < _FEW:
        left = torch.cat((left, left.new_zeros(_FEW - rows, columns)))
    # oneDNN's kernels for a single output add in another order, so the output is computed twice.
    if outputs == 1:
        right, added = right.expand(2, columns), added if added is None else added.repeat(2)
    linear = torch.ops.mkldnn._linear_pointwise.default
    result = left
    for first in range(0, columns, RUN):
        parts = (left, right) if columns <= RUN else (left[:, first : first + RUN], right[:, first : first + RUN])
        if not (parts[1].is_contiguous() or parts[1].t().is_contiguous()):
            parts = (parts[0], parts[1].contiguous())  # oneDNN's kernel for other layouts adds in another order
        product: Tensor = linear(*parts, None if first else added, "none", [], "")
        result = result.add_(product) if first else product
    if turned or rows < _FEW or outputs == 1:
        result = result[:rows, :outputs].t() if turned else result[:rows, :outputs]
        result = result.clone(memory_format=torch.contiguous_format)  # owns its memory, as torch's products do
    return result.add_(bias) if turned and bias is not None else result


def _require_order() -> None:
    import torch

    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        raise InputError.at(_KEY, f"needs a torch that is built with oneDNN; {_REMEDY}")
    generator = torch.Generator().manual_seed(0)

    def drawn(rows: int, columns: int, *, turned: bool) -> Tensor:
        if turned:
            return torch.randn(columns, rows, generator=generator).t()
        return torch.randn(rows, columns, generator=generator)

    tested: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    for rows, columns, outputs in _TRIED:
        for turned in range(4):
            a = drawn(rows, columns, turned=bool(turned & 1))
            b = drawn(columns, outputs, turned=bool(turned & 2))
            bias = drawn(1, outputs, turned=False)[0]
            product = _product(a, b, bias)
            at = torch.tensor([0, outputs // 3, outputs // 2, outputs - 1])
            for row in {0, rows // 2, rows - 1}:
                pair = torch.nn.functional.pad(torch.cat((a[row][None], b[:, at].t())), (0, RUN - columns))
                tested.append((pair[:1].expand(len(at), RUN), pair[1:], bias[at], product[row, at]))
    lefts, rights, biases, computed = (torch.cat(each) for each in zip(*tested, strict=True))
    left, right = lefts.double(), rights.double()
    chain = torch.zeros(len(left))
    for k in range(RUN):
        # The product of two float32 is exact in float64. Double rounding may change a sum, but it does so on every CPU,
        # because all draw the same numbers.
        chain = (left[:, k] * right[:, k] + chain).float()
    if not torch.equal(chain + biases, computed):
        what = f"needs products that add in one order, which oneDNN of torch {torch.__version__} has not on this CPU"
        raise InputError.at(_KEY, f"{what}; {_REMEDY}")
