"""The optimizer of one flat parameter."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from andon.config.schema import Optimizer
from andon.step.flat import Range

_MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}


def build_optimizer(settings: Optimizer, ranges: Sequence[Range]) -> torch.optim.Optimizer:
    """The optimizer of ranges of one flat parameter. Weight decay leaves alone what `undecayed` names (seed S12)."""
    groups = [{"params": [r.weights], "weight_decay": settings.weight_decay if r.decays else 0.0} for r in ranges]
    if settings.name == "adamw":
        return torch.optim.AdamW(groups, lr=0.0, betas=settings.betas, eps=settings.eps, fused=True)
    # On a GPU it must be fused: only then can the device skip an update (`Replica.gate`).
    fused = True if ranges[0].weights.is_cuda else None
    return torch.optim.SGD(groups, lr=0.0, momentum=settings.momentum, fused=fused)


def moments_of(settings: Optimizer) -> tuple[str, ...]:
    """The names of the flat tensors that the optimizer may keep."""
    return _MOMENTS[settings.name]


def state_names(settings: Optimizer) -> frozenset[str]:
    """The names of all tensors in the optimizer's state after an update."""
    moments = moments_of(settings) if settings.name != "sgd" or settings.momentum else ()
    return frozenset((*moments, *(("step",) if counts_updates(settings) else ())))


def counts_updates(settings: Optimizer) -> bool:
    """Whether the optimizer counts its updates itself, in an fp32 `step`."""
    return settings.name == "adamw"
