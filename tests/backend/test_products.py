"""Products that add in one order: the law by numbers of 80 bits, whatever oneDNN is allowed to use of the CPU."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from andon.backend.products import products_in_order
from andon_contracts.fingerprint import environment

pytestmark = [
    pytest.mark.skipif(
        "avx2" not in str(environment()["instructions"]).split(),
        reason="this CPU has no AVX2: nothing is portable here",
    ),
    pytest.mark.skipif(np.finfo(np.longdouble).nmant < 63, reason="needs numbers of 80 bits, as x86 has them"),
]
SIZES = st.integers(1, 9) | st.sampled_from((16, 31, 48, 77, 130, 384, 600))
COLUMNS = st.integers(1, 9) | st.sampled_from((384, 511, 512, 513, 1023, 1025, 1536))


def law(a: Tensor, b: Tensor, bias: Tensor | None, rows: list[int], outputs: list[int]) -> Tensor:
    """The elements of `rows` and `outputs`: of each 512 products a chain of fused multiply-adds, chains added in order.

    A product of two float32 has 48 bits; with a float32 added it is rounded to 64, then to 24. The two roundings are as
    one unless the 40 bits between them are those of a half.
    """
    left, right = a[rows].detach().numpy().astype(np.longdouble), b[:, outputs].detach().numpy().astype(np.longdouble)
    total: NDArray[np.float32] | None = None
    for first in range(0, a.shape[1], 512):
        chain = np.zeros((len(rows), len(outputs)), np.float32)
        for k in range(first, min(first + 512, a.shape[1])):
            chain = (np.outer(left[:, k], right[k]) + chain).astype(np.float32)
        if total is not None:
            total = total + chain
        else:
            total = chain if bias is None else chain + bias[outputs].detach().numpy()
    assert total is not None
    return torch.from_numpy(total)


def matrix(rows: int, columns: int, layout: str, generator: torch.Generator) -> Tensor:
    """Drawn numbers of very different sizes, in rows, in columns, cut from wider rows, or one row over and over."""
    wide = torch.randn(rows + 3, columns + 3, generator=generator) * torch.randn(columns + 3, generator=generator).exp()
    if layout == "repeated":
        return wide[:1, :columns].expand(rows, columns)
    cut = wide[1 : rows + 1, 2 : columns + 2]
    return {"rows": cut.contiguous(), "columns": cut.t().contiguous().t(), "cut": cut}[layout]


@pytest.fixture(scope="module", autouse=True)
def in_order() -> Iterator[None]:
    """Products add in order meanwhile, and as torch adds them afterwards."""
    a, b = torch.randn(40, 600), torch.randn(600, 40)
    plain = a @ b
    with products_in_order():
        yield
    assert torch.equal(a @ b, plain)


LAYOUTS = st.sampled_from(("rows", "columns", "cut", "repeated"))


@settings(deadline=None)
@example(8, 34, 1, "rows", "rows", None, 0)  # one output
@example(2, 130, 1, "columns", "columns", "bias", 0)
@example(1, 48, 48, "columns", "rows", None, 0)  # one row
@example(1, 1025, 1, "rows", "columns", "bias", 0)
@example(16, 368, 9, "cut", "cut", None, 0)
@given(SIZES, COLUMNS, SIZES, LAYOUTS, LAYOUTS, st.sampled_from((None, "bias", "scaled")), st.integers(0, 2**32))
def test_a_product_is_the_chain(
    rows: int, columns: int, outputs: int, left: str, right: str, more: str | None, seed: int
) -> None:
    """Of any shape and layout, with a bias, and where what is added is scaled."""
    drawn = torch.Generator().manual_seed(seed)
    a, b = matrix(rows, columns, left, drawn), matrix(columns, outputs, right, drawn)
    bias = torch.randn(outputs, generator=drawn)
    at = sorted({0, rows // 2, rows - 1}), sorted({0, outputs // 3, outputs - 1})
    if more is None:
        made, wanted = a @ b, law(a, b, None, *at)
    elif more == "bias":
        made, wanted = torch.addmm(bias, a, b), law(a, b, bias, *at)
    else:
        made = torch.addmm(bias, a, b, beta=0.5, alpha=2.0)
        wanted = law(a, b, None, *at) * 2 + 0.5 * bias[at[1]]
    assert made.shape == (rows, outputs)
    assert made.is_contiguous()
    assert torch.equal(made[at[0]][:, at[1]], wanted)


@pytest.mark.parametrize("shape", [(3, 5, 700), (1, 1, 700), (2, 1, 9)])
def test_a_layer_adds_so_forward_and_backward(shape: tuple[int, ...]) -> None:
    """What a model calls, the gradient of its input and that of its weight."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(shape[-1], 530)
    given_ = torch.randn(shape, requires_grad=True)
    made = layer(given_)
    down = torch.randn_like(made)
    made.backward(down)
    flat, above = given_.reshape(-1, shape[-1]), down.reshape(-1, 530)
    rows, outputs, columns = [0, flat.shape[0] - 1], [0, 7, 529], [0, shape[-1] - 1]
    assert layer.weight.grad is not None
    assert given_.grad is not None
    weight = layer.weight
    assert torch.equal(made.reshape(-1, 530)[rows][:, outputs], law(flat, weight.t(), layer.bias, rows, outputs))
    seen = given_.grad.reshape(-1, shape[-1])[rows][:, columns]
    assert torch.equal(seen, law(above, weight, None, rows, columns))
    assert torch.equal(layer.weight.grad[outputs][:, columns], law(above.t(), flat, None, outputs, columns))


def test_what_is_no_product_of_float32_is_as_ever() -> None:
    """Other dtypes, nothing at all, what a factor of 0 leaves out, and sizes that do not fit."""
    for dtype in (torch.float64, torch.int64, torch.bfloat16):
        a, b = torch.arange(6).reshape(2, 3).to(dtype), torch.arange(12).reshape(3, 4).to(dtype)
        wanted = torch.tensor([[20, 23, 26, 29], [56, 68, 80, 92]]).to(dtype)
        assert torch.equal(a @ b, wanted)
        assert torch.equal(torch.addmm(b[0], a, b, beta=2, alpha=3), 3 * wanted + 2 * b[0])
    assert (torch.ones(0, 3) @ torch.ones(3, 2)).shape == (0, 2)
    assert torch.equal(torch.addmm(torch.ones(2), torch.ones(3, 0), torch.ones(0, 2)), torch.ones(3, 2))
    nothing = torch.full((2,), float("nan"))
    assert torch.equal(torch.addmm(nothing, torch.ones(2, 3), torch.ones(3, 2), beta=0), torch.full((2, 2), 3.0))
    for a, b in ((torch.ones(2, 3), torch.ones(4, 5)), (torch.ones(2, 3), torch.ones(3, 4, dtype=torch.float64))):
        with pytest.raises(RuntimeError, match=r"size|scalar type"):
            torch.mm(a, b)
    with pytest.raises(RuntimeError, match=r"size|shape"):
        torch.addmm(torch.ones(7), torch.ones(2, 3), torch.ones(3, 4))


_DIGEST = """
import hashlib, torch
from andon.backend.products import products_in_order
torch.manual_seed(0)
said = hashlib.sha256()
with products_in_order():
    for rows, columns, outputs in ((1, 700, 9), (37, 1024, 384), (300, 640, 5), (64, 1536, 384)):
        for a in (torch.randn(rows, columns), torch.randn(columns, rows).t()):
            for b in (torch.randn(columns, outputs), torch.randn(outputs, columns).t()):
                said.update((a @ b).numpy().tobytes())
                said.update(torch.addmm(torch.randn(outputs), a, b).numpy().tobytes())
print(said.hexdigest())
"""


def of_a_process(**more: str) -> subprocess.CompletedProcess[str]:
    """What `_DIGEST` prints where the environment says `more`."""
    path = os.pathsep.join(path for path in sys.path if path)
    said = {**os.environ, "PYTHONPATH": path, **more}
    return subprocess.run([sys.executable, "-c", _DIGEST], env=said, capture_output=True, text=True, check=False)


def test_the_bits_are_the_same_at_every_level_of_avx_and_of_threads() -> None:
    """They are one digest, as those of more than 512 products at once, which oneDNN cuts by the CPU, are not."""
    levels = [{"ONEDNN_MAX_CPU_ISA": level} for level in ("AVX2", "AVX2_VNNI", "AVX512_CORE", "ALL")]
    said = [of_a_process(**level, OMP_NUM_THREADS=threads) for level in levels for threads in ("1", "2")]
    assert {(each.returncode, each.stderr) for each in said} == {(0, "")}
    assert len({each.stdout for each in said}) == 1
    assert len(said[0].stdout.strip()) == hashlib.sha256().digest_size * 2


def test_a_cpu_on_which_they_add_otherwise_is_refused() -> None:
    """Without AVX2 there is no fused multiply-add, and nothing is trained with other bits in silence."""
    ended = of_a_process(ONEDNN_MAX_CPU_ISA="SSE41")
    assert ended.returncode != 0
    assert "run.portable: needs products that add in one order" in ended.stderr
