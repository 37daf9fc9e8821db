"""Small models and loops under a watch, and helpers that run them on ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import andon
from andon_contracts.watch import Watch
from tests.support.ranks import run_ranks
from tests.watch.clean import ignore


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


class Dropping(nn.Module):
    """Dropout by a function, so that no module says that numbers are drawn."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.4, self.training)


def sgd(model: nn.Module, rate: float = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=rate)


def loss_of(model: nn.Module) -> Tensor:
    loss: Tensor = model(torch.ones(3, next(model.parameters()).shape[-1])).square().sum()
    return loss


def watched(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    updates: int,
    at: Callable[[int], object] = lambda step: None,
    loss: Callable[[nn.Module], Tensor] = loss_of,
    end: Callable[[nn.Module], object] = lambda model: None,
    **settings: Any,
) -> Watch:
    """A watch that has seen so many updates.

    at: what happens between a backward pass and its update. end: what is done with the model before the watch closes.
    """
    with andon.watch(model, optimizer, **({"action": ignore} | settings)) as watch:
        for step in range(1, updates + 1):
            loss(model).backward()
            at(step)
            optimizer.step()
            optimizer.zero_grad()
        end(model)
    return watch


def clauses(watch: Watch) -> list[str]:
    return [found.clause for found in watch.findings]


def answers(world: int, work: Callable[..., Any], *given: Any, **settings: float) -> list[Any]:
    return [outcome.get() for outcome in run_ranks(world, work, *given, **settings)]


def raised_by(use: Callable[[], object]) -> str:
    try:
        use()
    except Exception as error:  # noqa: BLE001 - what it is, the test says
        return f"{type(error).__name__}: {error}"
    return "accepted"
