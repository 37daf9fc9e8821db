"""The parts of a sequence classifier: its backbone, and what peft put around it."""

from __future__ import annotations

from typing import Any

from torch import nn


def backbone_of(model: nn.Module) -> nn.Module:
    """The model without its adapter's wrapper and without its head."""
    base: Any = without_adapter(model)
    found: nn.Module = getattr(base, base.base_model_prefix)
    return found


def without_adapter(model: nn.Module) -> nn.Module:
    """The classifier of transformers, whose layers are adapted if they were: peft's wrapper is taken off."""
    adapted: Any = model
    found: nn.Module = adapted.get_base_model() if hasattr(adapted, "get_base_model") else model
    return found
