"""Deterministic kernels are demanded before anything is computed."""

from __future__ import annotations

import os

import pytest
import torch

from andon.backend.devices import demand_determinism
from andon.console.problems import InputError

NAME = "CUBLAS_WORKSPACE_CONFIG"
GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


def test_cublas_is_told_before_a_gpu_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its workspace decides whether its results are the same from run to run; on a CPU nothing is set."""
    monkeypatch.setenv(NAME, "")
    monkeypatch.delenv(NAME)
    demand_determinism([CPU])
    assert NAME not in os.environ
    demand_determinism([CPU, GPU])
    assert os.environ[NAME] == ":4096:8"
    assert torch.are_deterministic_algorithms_enabled()


def test_memory_is_not_filled_before_a_gpu_writes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, ":16:8")
    demand_determinism([CPU])
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    demand_determinism([GPU])
    assert not torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]


@pytest.mark.parametrize("given", [":0:0", ":2048:8", ""])
def test_another_workspace_is_refused(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv(NAME, given)
    with pytest.raises(InputError, match=r"CUBLAS_WORKSPACE_CONFIG.*set :4096:8 or :16:8"):
        demand_determinism([GPU])


def test_a_workspace_that_is_right_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, ":16:8")
    demand_determinism([GPU])
    assert os.environ[NAME] == ":16:8"
