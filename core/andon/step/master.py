"""The weights and the gradient that an optimizer sees: the model's own flat buffers, or others elsewhere.

Kernels of a GPU divide, add up a norm and update with other roundings than those of a CPU. Where ranks of both kinds
are in one group, all of them do this on the CPU, and those on GPUs are given the bits of the result.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from andon.step.flat import FlatParameters


@dataclass(frozen=True)
class Master:
    """weights: a leaf parameter [size] fp32 whose `.grad` is gradient [size] fp32. apart: whether they are not the
    model's own."""

    weights: nn.Parameter
    gradient: torch.Tensor
    apart: bool

    @classmethod
    def of(cls, parameters: FlatParameters, device: torch.device | None) -> Master:
        """Buffers of their own on `device`, or for None those of `parameters`."""
        weights, gradient = parameters.weights, parameters.gradient
        if device is not None:
            weights = nn.Parameter(weights.detach().to(device, copy=True))
            gradient = torch.zeros(parameters.size, device=device)
        weights.grad = gradient
        return cls(weights, gradient, device is not None)

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.gradient.device

    def take(self, parameters: FlatParameters) -> None:
        """Take over the weights that the model has."""
        if self.apart:
            self.weights.data.copy_(parameters.weights.data)

    def give(self, parameters: FlatParameters) -> None:
        """Have the model's weights be these."""
        if self.apart:
            parameters.weights.data.copy_(self.weights.data)
