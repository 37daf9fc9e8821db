"""The optimizer of one flat parameter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from andon.step.flat import Range

_MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}
_COUNTING = ("adamw",)


@dataclass(frozen=True)
class OptimizerSpec:
    """Which torch optimizer, and its hyperparameters. Weight decay leaves alone what `undecayed` names (seed S12)."""

    name: str = "adamw"
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    momentum: float = 0.0

    def build(self, ranges: Sequence[Range]) -> torch.optim.Optimizer:
        """The optimizer of the ranges of one flat parameter. Raises `ValueError` for an unknown name."""
        groups = [{"params": [r.weights], "weight_decay": self.weight_decay if r.decays else 0.0} for r in ranges]
        if self.name == "adamw":
            return torch.optim.AdamW(groups, lr=0.0, betas=self.betas, eps=self.eps, fused=True)
        if self.name == "sgd":
            # On a GPU it must be fused: only then can the device skip an update (`Replica.gate`).
            fused = True if ranges[0].weights.is_cuda else None
            return torch.optim.SGD(groups, lr=0.0, momentum=self.momentum, fused=fused)
        msg = f"unknown optimizer {self.name!r}; there are adamw and sgd"
        raise ValueError(msg)

    @property
    def moments(self) -> tuple[str, ...]:
        """The flat tensors that it may keep, by name."""
        return _MOMENTS[self.name]

    @property
    def kept(self) -> frozenset[str]:
        """The names of all that it keeps once it has made an update."""
        moments = self.moments if self.name != "sgd" or self.momentum else ()
        return frozenset((*moments, *(("step",) if self.counts else ())))

    @property
    def counts(self) -> bool:
        """Whether it counts its updates itself, in an fp32 `step`."""
        return self.name in _COUNTING
