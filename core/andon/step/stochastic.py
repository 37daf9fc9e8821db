"""Functions that draw random numbers, and the error of what draws in a way that cannot be keyed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_functional = torch.nn.functional
STOCHASTIC: frozenset[Callable[..., Any]] = frozenset(
    {
        _functional.dropout,
        _functional.dropout1d,
        _functional.dropout2d,
        _functional.dropout3d,
        _functional.alpha_dropout,
        _functional.feature_alpha_dropout,
        _functional.scaled_dot_product_attention,
        _functional.multi_head_attention_forward,
        _functional.rrelu,
        torch.dropout,
        torch.alpha_dropout,
        torch.feature_dropout,
        torch.bernoulli,
        torch.rand,
        torch.randn,
        torch.rand_like,
        torch.randn_like,
        torch.randint,
        torch.randperm,
        torch.normal,
        torch.Tensor.bernoulli_,
        torch.Tensor.bernoulli,
        torch.Tensor.normal_,
        torch.Tensor.uniform_,
    }
)
"""Functions that may draw random numbers, as a model calls them."""


class UnkeyedRandomnessError(ValueError):
    """The model draws random numbers in a way that cannot be keyed by micro-batch."""
