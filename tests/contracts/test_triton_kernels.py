"""Where Triton is missing it is said, once."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from importlib.machinery import ModuleSpec

import pytest

from andon_contracts.triton_kernels import has_triton

LOOKED_UP: Callable[[], bool] = has_triton.__wrapped__
"""Without what it keeps of its first call."""


def test_a_missing_triton_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks on GPUs are then slower, which nobody should have to find out by timing."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.warns(RuntimeWarning, match="Triton is not installed"):
        assert not LOOKED_UP()


def test_one_that_is_there_is_used_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it works is not asked."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: ModuleSpec(name, None))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert LOOKED_UP()
