"""The 2-norm of long tensors, against float64 and against the order in which it is to be added."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from andon.model.memory import measure_peak_bytes
from andon_contracts.laws.loop import torch_norm_error
from andon_contracts.norms import flat_norm, sum_of_squares
from andon_contracts.observe import Observer, norm_of

BOUND = 8.5 * 2.0**-24


def _normal(count: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(count))


def _heavy(count: int) -> Tensor:
    return _normal(count) * _normal(count).mul_(3).exp_()


def _equal(count: int) -> Tensor:
    return torch.full((count,), 1.1)


def _true(flat: Tensor) -> float:
    """By float64, in pieces so that no copy of the whole is made."""
    return math.sqrt(math.fsum(float(piece.double().square().sum()) for piece in flat.split(1 << 20)))


@pytest.mark.parametrize("drawn", [_normal, _heavy, _equal])
@pytest.mark.parametrize("count", [1, 63, 65, 1_000, 65_537, (1 << 20) + 3])
def test_the_norm_is_that_of_float64_at_any_length(drawn: Callable[[int], Tensor], count: int) -> None:
    flat = drawn(count)
    assert float(flat_norm(flat)) == pytest.approx(_true(flat), rel=BOUND)


def test_torchs_own_norm_of_a_long_tensor_is_off_by_no_more_than_is_said() -> None:
    flat = _heavy(30_000_000)
    assert float(flat_norm(flat)) == pytest.approx(_true(flat), rel=BOUND)
    assert float(torch.linalg.vector_norm(flat)) == pytest.approx(_true(flat), rel=torch_norm_error(flat.numel()))


@pytest.mark.parametrize("count", [1, 64, 65, 1_000])
def test_squares_are_added_by_halves(count: int) -> None:
    flat = _normal(count)
    squares = [element * element for element in flat.unbind()]
    while len(squares) > 64:
        kept = (len(squares) + 1) // 2
        pairs = itertools.zip_longest(squares[:kept], squares[kept:])
        squares = [one if other is None else one + other for one, other in pairs]
    assert sum_of_squares(flat) == math.fsum(map(float, squares))


# The default run shows the order of the additions, on which the bits depend: test_squares_are_added_by_halves.
@pytest.mark.deep
def test_the_bits_are_those_of_a_cpu_with_other_vectors() -> None:
    """torch is told to use no vector instructions, and several threads."""
    # Divisions, which every CPU rounds alike.
    flat = torch.arange(1, 3_000_001).remainder(1009) / torch.arange(1, 3_000_001).remainder(997).add(1)
    program = (
        "import torch; torch.set_num_threads(3); from andon_contracts.norms import flat_norm; "
        "flat = torch.arange(1, 3_000_001).remainder(1009) / torch.arange(1, 3_000_001).remainder(997).add(1); "
        "print(float(flat_norm(flat)).hex())"
    )
    said = {**os.environ, "ATEN_CPU_CAPABILITY": "default"}
    found = subprocess.run([sys.executable, "-c", program], env=said, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == float(flat_norm(flat)).hex()


@pytest.mark.parametrize("scale", [1e-44, 1e-30, 1e-12, 1e19, 1e30, 2e35])
def test_no_square_overflows_or_is_lost(scale: float) -> None:
    flat = _normal(1_000_003).clamp(-5, 5) * scale
    assert float(flat_norm(flat)) == pytest.approx(_true(flat), rel=BOUND)


def test_what_is_not_finite() -> None:
    huge = torch.full((100,), 3e38)
    assert float(flat_norm(huge[:1])) == float(huge[0])
    assert float(flat_norm(huge)) == math.inf
    assert float(flat_norm(torch.tensor([1.0, math.inf]))) == math.inf
    assert math.isnan(float(flat_norm(torch.tensor([math.inf, math.nan]))))
    assert float(flat_norm(torch.zeros(3))) == float(flat_norm(torch.empty(0))) == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_watch_measures_long_tensors_as_well(dtype: torch.dtype) -> None:
    tensors = [_normal(10_000_000).to(dtype), _normal(7).to(dtype)]
    wanted = _true(torch.cat(tensors))
    assert norm_of(tensors) == pytest.approx(wanted, rel=1e-6)
    assert Observer().look(tensors, norm=True).norm == pytest.approx(wanted, rel=1e-6)
    if dtype != torch.float16:
        assert norm_of([tensors[0] * 1e20]) == math.inf


@pytest.mark.parametrize("scale", [1.0, 1e-30])
@pytest.mark.parametrize("count", [1_000, 3_000_000])
def test_it_needs_a_piece_of_memory_and_no_copy(count: int, scale: float) -> None:
    flat = _normal(count) * scale
    peak = measure_peak_bytes(lambda: flat_norm(flat)).peak - flat.nbytes
    assert peak <= min(4 << 20, flat.nbytes) + 64
