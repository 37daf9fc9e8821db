"""Products that add in one order: the law by numbers of 80 bits, whatever oneDNN is allowed to use of the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from andon.console.messages import InputError
from andon.launch import portable
from andon.launch.portable import portable_kernels
from andon_contracts.fingerprint import environment
from tests.backend.ordered import digest
from tests.repository.sources import ROOT

pytestmark = [
    pytest.mark.skipif(
        "avx2" not in str(environment()["instructions"]).split(),
        reason="this CPU has no AVX2: nothing is portable here",
    ),
    pytest.mark.skipif(np.finfo(np.longdouble).nmant < 63, reason="needs numbers of 80 bits, as x86 has them"),
]
SIZES = st.integers(1, 9) | st.sampled_from((16, 31, 48, 77, 130, 384, 600))
COLUMNS = st.integers(1, 9) | st.sampled_from((383, 384, 385, 512, 767, 769, 1536))


def law(a: Tensor, b: Tensor, bias: Tensor | None, rows: list[int], outputs: list[int]) -> Tensor:
    """The elements of `rows` and `outputs`: of each 384 products a chain of fused multiply-adds, chains added in order,
    then the bias.

    A product of two float32 has 48 bits; with a float32 added it is rounded to 64, then to 24. The two roundings are as
    one unless the 40 bits between them are those of a half.
    """
    left, right = a[rows].detach().numpy().astype(np.longdouble), b[:, outputs].detach().numpy().astype(np.longdouble)
    total: NDArray[np.float32] | None = None
    for first in range(0, a.shape[1], 384):
        chain = np.zeros((len(rows), len(outputs)), np.float32)
        for k in range(first, min(first + 384, a.shape[1])):
            chain = (np.outer(left[:, k], right[k]) + chain).astype(np.float32)
        total = chain if total is None else total + chain
    assert total is not None
    return torch.from_numpy(total if bias is None else total + bias[outputs].detach().numpy())


def matrix(rows: int, columns: int, layout: str, generator: torch.Generator) -> Tensor:
    """Drawn numbers of very different sizes, in rows, in columns, cut from wider rows, or one row over and over."""
    wide = torch.randn(rows + 3, columns + 3, generator=generator) * torch.randn(columns + 3, generator=generator).exp()
    if layout == "repeated":
        return wide[:1, :columns].expand(rows, columns)
    cut = wide[1 : rows + 1, 2 : columns + 2]
    return {"rows": cut.contiguous(), "columns": cut.t().contiguous().t(), "cut": cut}[layout]


@pytest.fixture(scope="module", autouse=True)
def plain() -> Iterator[dict[str, object]]:
    """Products add in order in these tests; what torch itself makes of other products."""
    made = odd_ones()
    with portable_kernels():
        yield made


BIASES: dict[str, Callable[[Tensor], Tensor]] = {
    "of outputs": lambda bias: bias,
    "strided": lambda bias: torch.stack((bias, bias), 1)[:, 1],
    "one row": lambda bias: bias[None],
    "a number": lambda bias: bias[:1].expand(len(bias)),
}


LAYOUTS = st.sampled_from(("rows", "columns", "cut", "repeated"))


@settings(deadline=None)
@example(8, 34, 1, "rows", "rows", None, 0)  # one output
@example(2, 130, 1, "columns", "columns", "of outputs", 0)
@example(1, 48, 48, "columns", "rows", None, 0)  # one row
@example(1, 1025, 1, "rows", "columns", "of outputs", 0)
@example(16, 368, 9, "cut", "cut", None, 0)
@example(15, 384, 40, "rows", "columns", "of outputs", 0)
@given(SIZES, COLUMNS, SIZES, LAYOUTS, LAYOUTS, st.sampled_from((None, *BIASES)), st.integers(0, 2**32))
def test_a_product_is_the_chain(
    rows: int, columns: int, outputs: int, left: str, right: str, more: str | None, seed: int
) -> None:
    drawn = torch.Generator().manual_seed(seed)
    a, b = matrix(rows, columns, left, drawn), matrix(columns, outputs, right, drawn)
    bias = None if more is None else BIASES[more](torch.randn(outputs, generator=drawn))
    at = sorted({0, rows // 2, rows - 1}), sorted({0, outputs // 3, outputs - 1})
    made = a @ b if bias is None else torch.addmm(bias, a, b)
    wanted = law(a, b, None if bias is None else bias.reshape(-1), *at)
    assert made.shape == (rows, outputs)
    assert made.is_contiguous()
    assert made.untyped_storage().nbytes() == made.nbytes
    assert torch.equal(made[at[0]][:, at[1]], wanted)


@pytest.mark.parametrize("shape", [(3, 5, 700), (1, 1, 700), (2, 1, 9)])
def test_a_layer_adds_so_forward_and_backward(shape: tuple[int, ...]) -> None:
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


def odd_ones() -> dict[str, object]:
    """What torch makes of products that are none of float32 matrices, or are more than that; of a refusal, its kind."""
    drawn = torch.Generator().manual_seed(0)
    a, b, wide = (torch.randn(shape, generator=drawn) for shape in ((30, 70), (70, 20), (30, 20)))
    nothing = torch.full((20,), float("nan"))
    made: dict[str, Callable[[], Tensor]] = {
        "no rows": lambda: a[:0] @ b,
        "no terms": lambda: torch.addmm(b[0], a[:, :0], b[:0]),
        "nothing is read": lambda: torch.addmm(nothing, a, b, beta=0).isnan(),
        "sizes": lambda: a @ a,
        "a wrong bias": lambda: torch.addmm(b[0, :7], a, b),
        "a bias of another dtype": lambda: torch.addmm(b.double()[:20, 0], a, b),
        "two dtypes": lambda: a @ b.double(),
        "a vector": lambda: torch.mm(a, b[:, 0]),
        "a vector for a bias and a vector": lambda: torch.addmm(b[0], a, b[:, 0]),
    }
    for dtype in (torch.bfloat16, torch.float64, torch.int64):
        x, y, z = a.to(dtype), b.to(dtype), wide.to(dtype)
        made |= {
            f"{dtype}": lambda x=x, y=y: x @ y,
            f"{dtype} with a bias": lambda x=x, y=y, z=z: torch.addmm(z[0], x, y),
            f"{dtype} scaled": lambda x=x, y=y, z=z: torch.addmm(z, x, y, beta=2, alpha=3),
        }
    shown: dict[str, object] = {}
    for name, make in made.items():
        try:
            shown[name] = (tensor := make()).dtype, tuple(tensor.shape), tensor.tolist()
        except RuntimeError:
            shown[name] = RuntimeError
    return shown


def test_what_is_no_product_of_float32_matrices_is_what_torch_makes(plain: dict[str, object]) -> None:
    ours = odd_ones()
    assert sum(each is RuntimeError for each in ours.values()) == 6
    assert str(ours) == str(plain)  # NaN is not equal to itself


def of_a_process(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), *(path for path in sys.path if path)])
    environ = {**os.environ, "PYTHONPATH": path, **more}
    command = [sys.executable, "-m", "tests.backend.ordered", *arguments]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False)


def test_the_bits_are_the_same_on_a_lesser_cpu_and_torch_computes_as_before_afterwards() -> None:
    done = of_a_process(ONEDNN_MAX_CPU_ISA="AVX2", ATEN_CPU_CAPABILITY="avx2")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == [digest()] * 2


# By default: products at two levels (above); here GELU and a convolution too, at each level.
@pytest.mark.deep
def test_the_bits_are_the_same_at_every_level_of_avx_and_of_threads() -> None:
    levels = [{"ONEDNN_MAX_CPU_ISA": level, "ATEN_CPU_CAPABILITY": "avx2"} for level in ("AVX2", "AVX512_CORE", "ALL")]
    done = [of_a_process("all", **level) for level in levels]
    assert {(each.returncode, each.stderr) for each in done} == {(0, "")}
    assert len({line for each in done for line in each.stdout.split()}) == 1


def test_a_cpu_on_which_they_add_otherwise_is_refused() -> None:
    """Without AVX2 there is no fused multiply-add, and nothing is trained with other bits in silence."""
    done = of_a_process("all", ONEDNN_MAX_CPU_ISA="SSE41")
    assert done.returncode != 0
    assert "run.portable: needs products that add in one order" in done.stderr


def _halves(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """As a CPU would add that cuts every sum in two, and begins the second half with the bias."""
    half = a.shape[1] // 2
    first = (a[:, :half].double() @ b[:half].double()).float()
    rest = (a[:, half:].double() @ b[half:].double()).float()
    return first + (rest if bias is None else rest + bias)


def _begun(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    half = a.shape[1] // 2
    if bias is None or half == 0:
        return RIGHT(a, b, bias)
    return RIGHT(a[:, :half], b[:half], bias).add_(RIGHT(a[:, half:], b[half:], None))


RIGHT = portable._product


@pytest.mark.parametrize(
    ("wrong", "differs"),
    [
        (_halves, lambda made, other: other if made.shape[1] > 1600 else made),
        (_halves, lambda made, other: other if made.shape[0] > 400 else made),
        (_halves, lambda made, other: torch.cat((made[:1], other[1:-1], made[-1:]))),
        (_halves, lambda made, other: torch.cat((made[:, :7], other[:, 7:-1], made[:, -1:]), 1)),
        (_begun, lambda made, other: other),
    ],
    ids=["many outputs", "many rows", "rows within", "outputs within", "a bias before the sum"],
)
def test_what_is_tried_shows_a_cpu_that_adds_otherwise(
    monkeypatch: pytest.MonkeyPatch, wrong: Callable[..., Tensor], differs: Callable[[Tensor, Tensor], Tensor]
) -> None:
    monkeypatch.setattr(portable, "_product", lambda *given: differs(RIGHT(*given), wrong(*given)))
    with pytest.raises(InputError, match=r"needs products that add in one order"):
        portable._require_order()
