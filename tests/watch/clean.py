"""Loops that are right, of many kinds: a watch must say nothing of any of them."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import andon
from andon_contracts.watch import Watch
from tests.watch.loop import Model, data

STEPS = 20


class Normed(nn.Module):
    """A model with batch statistics and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, 8] to [rows, 3]."""
        logits: Tensor = self.net(x)
        return logits


class WithoutUnused(Normed):
    """The same without the layer that nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        del self.unused


@dataclass(frozen=True)
class Kind:
    """How a loop is built and run."""

    model: Callable[[], nn.Module] = Model
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    wrap: bool = True
    accumulate: int = 1
    clip: float | None = None
    warm_up: bool = False
    set_to_none: bool = True
    autocast: bool = False
    scaler: bool = False
    closure: bool = False
    average: bool = False
    find_unused: bool = False
    evaluate: bool = False
    ragged: bool = False


def sgd(parameters: Any, lr: float) -> torch.optim.Optimizer:
    """With momentum."""
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def foreach(parameters: Any, lr: float) -> torch.optim.Optimizer:
    """AdamW over lists of tensors."""
    return torch.optim.AdamW(parameters, lr=lr, foreach=True)


def fused(parameters: Any, lr: float) -> torch.optim.Optimizer:
    """AdamW in one kernel."""
    return torch.optim.AdamW(parameters, lr=lr, fused=True)


def lbfgs(parameters: Any, lr: float) -> torch.optim.Optimizer:
    """Evaluates its closure several times an update."""
    return torch.optim.LBFGS(parameters, lr=lr, max_iter=3)


KINDS = {
    "DDP": Kind(),
    "plain": Kind(wrap=False),
    "plain, zeros kept": Kind(wrap=False, set_to_none=False),
    "SGD, clipping": Kind(optimizer=sgd, clip=0.05),
    "AdamW foreach": Kind(optimizer=foreach, clip=1.0),
    "AdamW fused": Kind(optimizer=fused),
    "accumulation": Kind(accumulate=4, clip=0.1),
    "batch norm, dropout, accumulation": Kind(model=WithoutUnused, accumulate=4),
    "batch norm, SGD, evaluation on one rank": Kind(model=WithoutUnused, optimizer=sgd, evaluate=True),
    "warm-up from 0": Kind(warm_up=True),
    "bf16 autocast": Kind(model=WithoutUnused, autocast=True),
    "loss scaler with skipped steps": Kind(scaler=True, autocast=True),
    "LBFGS": Kind(optimizer=lbfgs, closure=True),
    "average of weights": Kind(average=True),
    "ragged last batch": Kind(ragged=True, accumulate=2),
}


def run(kind: Kind) -> tuple[list[str], int]:
    """What the watch found on this rank, and how often it evaluated a clause."""
    torch.manual_seed(0)
    inner = kind.model()
    model = DistributedDataParallel(inner, find_unused_parameters=kind.find_unused) if kind.wrap else inner
    optimizer = kind.optimizer([p for p in inner.parameters() if p.requires_grad], lr=0.0 if kind.warm_up else 1e-2)
    w = andon.watch(model, optimizer, action=print, folder=None)
    _train(kind, model, inner, optimizer, w)
    w.close()
    assert not kind.scaler or w.evaluations["finite"] < 2 * STEPS, "no step was skipped"
    return [str(found) for found in w.findings], sum(w.evaluations.values())


def _train(kind: Kind, model: nn.Module, inner: nn.Module, optimizer: torch.optim.Optimizer, w: Watch) -> None:
    torch.manual_seed(100 + dist.get_rank())
    scaler = torch.amp.GradScaler("cpu", enabled=kind.scaler, init_scale=2.0**24, growth_interval=4)
    average = copy.deepcopy(inner) if kind.average else None
    for step in range(1, STEPS + 1):
        if kind.warm_up:
            optimizer.param_groups[0]["lr"] = 1e-3 * (step - 1)
        if kind.closure:
            optimizer.step(lambda: _backward(kind, model, optimizer, scaler, step))  # noqa: B023 - called at once
        else:
            _backward(kind, model, optimizer, scaler, step)
            scaler.unscale_(optimizer)
            if kind.clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), kind.clip)
            scaler.step(optimizer)
            scaler.update()
        if average is not None:
            _average(average, inner)
        if kind.evaluate and dist.get_rank() == 0:
            model.eval()
            with torch.no_grad():
                inner(data()[0])
            model.train()


def _backward(kind: Kind, model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any, step: int) -> Tensor:
    optimizer.zero_grad(set_to_none=kind.set_to_none)
    x, y = data()
    rank, world = dist.get_rank(), dist.get_world_size()
    total = torch.zeros(())
    rows = list(range(len(x)) if kind.ragged and step % 3 == 0 else range(32))[rank::world]
    for micro, part in enumerate(torch.tensor(rows).tensor_split(kind.accumulate)):
        last = micro == kind.accumulate - 1
        model.require_backward_grad_sync = last
        if not kind.wrap:
            _broadcast(model)
        with torch.autocast("cpu", dtype=torch.float16 if kind.scaler else torch.bfloat16, enabled=kind.autocast):
            loss = nn.functional.cross_entropy(model(x[part]), y[part]) / kind.accumulate
        scaler.scale(loss).backward()
        total += loss.detach()
    if not kind.wrap:
        for p in itertools.filterfalse(_without_gradient, model.parameters()):
            assert p.grad is not None
            dist.all_reduce(p.grad)
            p.grad /= world
    dist.all_reduce(total)
    return total


def _without_gradient(parameter: nn.Parameter) -> bool:
    return parameter.grad is None


def _broadcast(model: nn.Module) -> None:
    for buffer in model.buffers():
        dist.broadcast(buffer, 0)


@torch.no_grad()
def _average(average: nn.Module, inner: nn.Module) -> None:
    for kept, now in zip(average.parameters(), inner.parameters(), strict=True):
        kept.lerp_(now, 0.1)


def run_all(names: Sequence[str]) -> dict[str, tuple[list[str], int]]:
    """What the watch found on this rank, by kind."""
    return {name: run(KINDS[name]) for name in names}
