"""The precision that a model computes in."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

_HALVES = (torch.bfloat16, torch.float16)


def half_of(model: nn.Module) -> torch.dtype | None:
    """The half precision of its matrix products, in which its weights are stored; None: they have its own."""
    config: Any = getattr(model, "config", None)
    stored = getattr(config, "dtype", None)
    return stored if stored in _HALVES else None


def computing(model: nn.Module, device: torch.device) -> AbstractContextManager[object]:
    """Inside, products of `model` on `device` are made in the half precision that its weights are stored in."""
    half = half_of(model)
    return nullcontext() if half is None else torch.autocast(device.type, dtype=half)
