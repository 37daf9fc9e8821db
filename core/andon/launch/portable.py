"""`run.portable`: the same bits on every x86 CPU with AVX2.

torch and MKL choose kernels by the CPU that they find. Two variables of the environment make both choose what any CPU
with AVX2 has. They are read once, at the first kernel and the first product of a process.

With `MKL_CBWR=COMPATIBLE` MKL's matrix products take two to three times as long, so oneDNN computes them instead. Its
kernels add one product after the other by fused multiply-adds, if there are not many: then neither the width of a
register nor the size of a cache changes the bits. So sums are cut into parts of that length here and not by oneDNN,
which cuts by the CPU.

    part[i, j] = fma(a[i, k], b[k, j], ... fma(a[i, 1], b[1, j], fma(a[i, 0], b[0, j], 0)))    for RUN values of k
    (a @ b + bias)[i, j] = ((part of the first RUN values + part of the next) + ...) + bias[j]

oneDNN does not promise this order, and the operation that calls it is private to torch. So it is tried on the CPU at
hand before anything is trained.

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
from andon.console.problems import InputError, Problem
from andon_contracts.fingerprint import environment

if TYPE_CHECKING:
    from torch import Tensor

SETTINGS = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "COMPATIBLE"}
"""The variables, with the values at which bits do not depend on the kind of CPU."""
RUN = 384
"""Products that are added one after the other. oneDNN splits more than these: torch 2.11's into parts of 448, torch
2.13's from 513 on, and at AVX2 into other parts than at AVX-512."""
FORM = f"parts of {RUN} fused multiply-adds"
"""The fingerprint's name for this order of additions; another order needs another name."""
_KEY = "run.portable"
_REMEDY = "run.portable=false trains without"
_ASK_BRANCH, _COMPATIBLE = 1, 3
"""MKL_CBWR_BRANCH and MKL_CBWR_COMPATIBLE of mkl_types.h."""
_IN_EFFECT = ("AVX2", _COMPATIBLE)
"""What torch and MKL answer if both variables took effect."""
_FEW = 16
"""torch 2.11's kernels for fewer rows add in another order, so rows of zeros are appended."""
_TRIED = ((2, RUN, 4000), (3, RUN // 2, 1536), (16, RUN, 77), (37, 1, 5), (64, 384, 8), (200, 8, 384), (500, RUN, 48))
"""Rows, products of each, outputs: with both layouts, kernels for few and many rows, whole registers and rests."""


def obstacles() -> list[Problem]:
    """What keeps processes of this machine from portable bits: a CPU without AVX2, variables with other values."""
    found = []
    if "avx2" not in str(environment()["instructions"]).split():
        # torch would believe the variable, and crash.
        found.append(Problem(_KEY, "needs a CPU with AVX2, which this one does not say it has"))
    for name, value in SETTINGS.items():
        if (set_to := os.environ.get(name, value)) != value:
            what = f"is {set_to!r} in the environment, {_KEY} needs {value!r}; unset one of the two"
            found.append(Problem(name, what))
    return found


def can_take_effect(run: Run) -> bool:
    """Whether this process can still compute portably, if `run` trains in it: not after torch has computed otherwise.

    If it can and torch is loaded, torch is settled on it, and the variables stay in the environment.
    """
    if run.backend != "inline" or "torch" not in sys.modules:
        return True
    with portable_environment(run.model_copy(update={"portable": True})):
        return _capability_and_branch() == _IN_EFFECT


@contextmanager
def portable_environment(run: Run) -> Iterator[None]:
    """Set the variables if `run.portable` asks for it, for processes that are started inside and for this one if new.

    On exit the environment is restored, except in a process that has trained itself: torch keeps the values it read, so
    the variables stay, and later records of this process are true. Raises `InputError` for `obstacles`.
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
    found = _capability_and_branch()
    if found == _IN_EFFECT:
        return
    if found[1] is None:
        raise InputError([Problem(_KEY, f"needs a torch that is built with MKL; {_REMEDY}")])
    settings = " ".join(f"{name}={value}" for name, value in SETTINGS.items())
    what = (
        f"comes too late: torch has computed in this process before, with {found[0]}; start the program with "
        f"{settings}, or train in ranks, which are processes of their own (run.backend=gloo)"
    )
    raise InputError([Problem(_KEY, what)])


def _capability_and_branch() -> tuple[str, int | None]:
    """torch's CPU capability, and MKL's branch of code: None without MKL, the variable's if MKL cannot be asked."""
    import torch

    capability = torch.backends.cpu.get_cpu_capability()
    if not torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
        return capability, None
    if capability != _IN_EFFECT[0]:
        return capability, 0  # asking MKL fixes its branch, and a plain run may follow
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        return capability, int(ctypes.CDLL(str(library)).mkl_serv_cbwr_get(_ASK_BRANCH))
    except (OSError, AttributeError):
        return capability, _COMPATIBLE


@contextmanager
def portable_kernels() -> Iterator[None]:
    """Context manager: in this process `mm` and `addmm` of float32 matrices on CPUs add in the order above.

    Forward and backward, because autograd calls the same two. MKL still computes batched products, products by a
    vector, scaled ones, those in place and those with `out`. oneDNN computes nothing else, because its exact GELU
    and its convolutions depend on the CPU. Raises `InputError` if torch has no oneDNN, or if it adds otherwise on
    this CPU.
    """
    import torch

    _require_order()
    was_enabled = torch.backends.mkldnn.enabled
    with torch.library._scoped_library("aten", "IMPL") as kernels:
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
    made = _product(a, b, None)
    return made.add_(added.expand(made.shape))


def _in_order(a: Tensor, b: Tensor) -> bool:
    """Whether both are float32 matrices with elements. Raises `RuntimeError` if their shapes do not fit."""
    import torch

    if not (a.dim() == b.dim() == 2 and a.dtype is b.dtype is torch.float32):
        return False
    if a.shape[1] != b.shape[0]:
        (rows, columns), (others, outputs) = a.shape, b.shape
        msg = f"mat1 and mat2 shapes cannot be multiplied ({rows}x{columns} and {others}x{outputs})"
        raise RuntimeError(msg)
    return a.numel() > 0 and b.numel() > 0


def _product(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """`a @ b + bias`: [rows, k] by [k, outputs], and [outputs]; a bias only for a product of one part."""
    import torch

    rows, outputs = a.shape[0], b.shape[1]
    # oneDNN copies a left matrix that lies by columns, as the gradient of a weight has it. The other way round are the
    # same products and sums: the smaller of the two is on the left, unless it has so few rows that it is filled up.
    other_way = _FEW <= outputs < rows or rows < _FEW <= outputs
    turned = other_way and not a.is_contiguous() and a.t().is_contiguous()
    left, right, added = (b.t(), a, None) if turned else (a, b.t(), bias)
    (rows, columns), outputs = left.shape, right.shape[0]
    if rows < _FEW:
        left = torch.cat((left, left.new_zeros(_FEW - rows, columns)))
    # For a single output oneDNN has other kernels, which add in another order: it is computed twice.
    if outputs == 1:
        right, added = right.expand(2, columns), added if added is None else added.repeat(2)
    linear = torch.ops.mkldnn._linear_pointwise.default
    made = left
    for first in range(0, columns, RUN):
        parts = (left, right) if columns <= RUN else (left[:, first : first + RUN], right[:, first : first + RUN])
        if not (parts[1].is_contiguous() or parts[1].t().is_contiguous()):
            parts = (parts[0], parts[1].contiguous())  # oneDNN has a kernel for others that adds in another order
        product: Tensor = linear(*parts, None if first else added, "none", [], "")
        made = made.add_(product) if first else product
    if turned or rows < _FEW or outputs == 1:
        made = made[:rows, :outputs].t() if turned else made[:rows, :outputs]
        made = made.clone(memory_format=torch.contiguous_format)  # alone in its memory, as a product of torch's is
    return made.add_(bias) if turned and bias is not None else made


def _require_order() -> None:
    """Raise `InputError` if an element of a tried product is not the chain of multiply-adds."""
    import torch

    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        raise InputError([Problem(_KEY, f"needs a torch that is built with oneDNN; {_REMEDY}")])
    generator = torch.Generator().manual_seed(0)

    def drawn(rows: int, columns: int, *, turned: bool) -> Tensor:
        if turned:
            return torch.randn(columns, rows, generator=generator).t()
        return torch.randn(rows, columns, generator=generator)

    tried: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    for rows, columns, outputs in _TRIED:
        for turned in range(4):
            a = drawn(rows, columns, turned=bool(turned & 1))
            b = drawn(columns, outputs, turned=bool(turned & 2))
            bias = drawn(1, outputs, turned=False)[0]
            made = _product(a, b, bias)
            at = torch.tensor([0, outputs // 3, outputs // 2, outputs - 1])
            for row in {0, rows // 2, rows - 1}:
                pair = torch.nn.functional.pad(torch.cat((a[row][None], b[:, at].t())), (0, RUN - columns))
                tried.append((pair[:1].expand(len(at), RUN), pair[1:], bias[at], made[row, at]))
    lefts, rights, biases, found = (torch.cat(each) for each in zip(*tried, strict=True))
    left, right = lefts.double(), rights.double()
    chain = torch.zeros(len(left))
    for k in range(RUN):
        # The product of two float32 is exact in float64. A sum that two roundings change is changed on every CPU,
        # because the numbers drawn are the same on all.
        chain = (left[:, k] * right[:, k] + chain).float()
    if not torch.equal(chain + biases, found):
        what = f"needs products that add in one order, which oneDNN of torch {torch.__version__} has not on this CPU"
        raise InputError([Problem(_KEY, f"{what}; {_REMEDY}")])
