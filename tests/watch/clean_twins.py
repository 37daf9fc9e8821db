"""Faults that any right loop can be given, on its last rank: silence about the right loop is then no blindness."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from andon_contracts.observe import plain

AT = 6  # the update of each optimizer at which, or from which on, its fault acts


def _nudge(optimizer: torch.optim.Optimizer) -> None:
    for p in _members(optimizer)[:1]:
        plain(p.data)[(0,) * p.dim()] += 0.01


def _spoil(optimizer: torch.optim.Optimizer) -> None:
    for p in _members(optimizer):
        if p.grad is not None and p.grad.layout == torch.strided:
            p.grad.data += 0.01 * (1 + p.grad.data.abs())


def _raise_rate(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * 1.5


def _members(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.numel()]


TWINS: dict[str, tuple[Any, Callable[[torch.optim.Optimizer], None]]] = {
    "weight": (register_optimizer_step_post_hook, _nudge),
    "gradient": (register_optimizer_step_pre_hook, _spoil),
    "rate": (register_optimizer_step_pre_hook, _raise_rate),
}
"""One weight is another behind an update; the gradients of one update are; the rate is, from an update on."""


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    """All loops within have the fault, on the last rank."""
    register, act = TWINS[name]
    seen: Counter[int] = Counter()

    def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        seen[id(optimizer)] += 1
        if seen[id(optimizer)] == AT and dist.get_rank() == dist.get_world_size() - 1:
            act(optimizer)

    handle = register(hook)
    try:
        yield
    finally:
        handle.remove()
