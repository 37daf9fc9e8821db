"""What an optimizer does to weights: clipping by the global norm, SGD and AdamW, as pure functions in float64."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

Tensors = Mapping[str, Tensor]
_CLIP_EPSILON = 1e-6
"""torch.nn.utils.clip_grad_norm_ divides by norm + 1e-6, so it scales a gradient at the limit a little too."""


@dataclass(frozen=True)
class State:
    """What an optimizer remembers by tensor: how often it was updated, and its moments (none before the first)."""

    counts: Mapping[str, int] = field(default_factory=dict)
    first: Tensors = field(default_factory=dict)
    second: Tensors = field(default_factory=dict)


def global_norm(gradients: Tensors) -> float:
    """The L2 norm over all tensors together."""
    return math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients.values()))


def is_clipped(norm: float, limit: float | None) -> bool:
    """Whether clipping to `limit` scales a gradient of that norm by more than fp32 rounds a norm at the limit."""
    return limit is not None and norm > limit * (1 + 1e-5)


def clip(gradients: Tensors, limit: float | None) -> dict[str, Tensor]:
    """The gradients scaled to a norm of at most `limit` (None: no limit)."""
    factor = 1.0 if limit is None else min(1.0, limit / (global_norm(gradients) + _CLIP_EPSILON))
    return {name: gradient * factor for name, gradient in gradients.items()}


@dataclass(frozen=True)
class Sgd:
    """w <- w - lr * b, with b <- momentum * b + (g + weight_decay * w) and b = the first such g at first.

    matrices_only: tensors of fewer than two dimensions do not decay.
    """

    momentum: float = 0.0
    weight_decay: float = 0.0
    matrices_only: bool = False

    def step(self, weights: Tensors, gradients: Tensors, state: State, lr: float) -> tuple[dict[str, Tensor], State]:
        """Weights and state after one update at the rate `lr`. A tensor without a gradient keeps its value."""
        updated, moments = dict(weights), dict(state.first)
        for name, gradient in gradients.items():
            moved = gradient + _decay(self, weights[name]) * weights[name]
            if self.momentum:
                moved = self.momentum * moments[name] + moved if name in moments else moved
                moments[name] = moved
            updated[name] = weights[name] - lr * moved
        return updated, State(first=moments)


@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019), epsilon outside the root as in torch.

    With t updates of this tensor, this one included:
        w <- w - lr * decay * w,  m <- b1 m + (1 - b1) g,  v <- b2 v + (1 - b2) g^2,
        w <- w - lr * (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + epsilon).
    matrices_only: tensors of fewer than two dimensions do not decay.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    weight_decay: float = 0.01
    matrices_only: bool = False

    def step(self, weights: Tensors, gradients: Tensors, state: State, lr: float) -> tuple[dict[str, Tensor], State]:
        """As `Sgd.step`."""
        fast, slow = self.betas
        updated, counts, first, second = dict(weights), dict(state.counts), dict(state.first), dict(state.second)
        for name, gradient in gradients.items():
            zero = torch.zeros_like(gradient)
            counts[name] = count = counts.get(name, 0) + 1
            first[name] = fast * first.get(name, zero) + (1 - fast) * gradient
            second[name] = slow * second.get(name, zero) + (1 - slow) * gradient.square()
            mean, spread = first[name] / (1 - fast**count), second[name] / (1 - slow**count)
            decayed = weights[name] * (1 - lr * _decay(self, weights[name]))
            updated[name] = decayed - lr * mean / (spread.sqrt() + self.epsilon)
        return updated, State(counts, first, second)


UpdateRule = Sgd | AdamW


def _decay(rule: UpdateRule, weight: Tensor) -> float:
    return 0.0 if rule.matrices_only and weight.dim() < 2 else rule.weight_decay
