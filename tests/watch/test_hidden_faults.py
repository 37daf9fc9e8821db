"""Faults that hide: behind hooks that were there first, below torch's counters, before the reduction."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import andon


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


def _backward(model: nn.Module, factor: float = 1.0) -> None:
    (model(torch.ones(3, 4)).square().sum() * factor).backward()


# behind a hook


def _repaired(gradient: Tensor) -> Tensor:
    return gradient.nan_to_num(0.0, 0.0, 0.0)


@pytest.mark.parametrize("first", [True, False])
def test_a_hook_that_repairs_a_gradient_hides_nothing(first: bool) -> None:
    """Whether the loop's hook was there before the watch or came after it; and the hooks still do what they do."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if first:
        handles = [p.register_hook(_repaired) for p in model.parameters()]  # type: ignore[no-untyped-call]
    watch = andon.watch(model, optimizer, action=lambda found: None)
    if not first:
        handles = [p.register_hook(_repaired) for p in model.parameters()]  # type: ignore[no-untyped-call]
    _backward(model, float("nan"))
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    optimizer.step()
    watch.close()
    assert [(found.clause, found.tensor) for found in watch.findings] == [("finite", "0.weight")]
    for handle in handles:
        handle.remove()
    optimizer.zero_grad()
    _backward(model, float("nan"))
    assert all(p.grad is not None and p.grad.isnan().all() for p in model.parameters())
