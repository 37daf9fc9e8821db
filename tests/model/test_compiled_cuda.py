"""A compiled backbone on a GPU: what the eager one computes, and the same bits however often and wherever it runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
TOLERANCE = 0.03  # what products of bf16 leave of a gradient's digits, relative


@pytest.fixture(scope="module", params=["kernels", "graphs"])
def found(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What `tests.support.compiled_pass` prints."""
    words = [sys.executable, "-m", "tests.support.compiled_pass", request.param]
    root = Path(__file__).parents[2]
    done = subprocess.run(words, capture_output=True, text=True, cwd=root, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def test_a_compiled_pass_computes_what_an_eager_one_does(found: dict[str, Any]) -> None:
    assert len(found["off"]) > 1
    assert max(found["off"]) <= TOLERANCE


def test_rows_of_new_tokens_get_the_gradient_of_an_eager_pass(found: dict[str, Any]) -> None:
    assert len(found["rows"]) == 2
    assert max(found["rows"]) <= TOLERANCE


def test_the_same_bits_again_and_with_shifted_allocations(found: dict[str, Any]) -> None:
    assert found["same"] == [True] * 4
    assert found["other"] == [False] * 4
