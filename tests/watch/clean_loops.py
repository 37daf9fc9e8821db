"""Right loops that differ in how they wrap, accumulate, clip, scale and optimize, written out once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import andon
from andon_contracts.watch import Watch
from tests.watch.clean import Seen, ignore, seen_by
from tests.watch.loop import Model, data

Optimizers = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
EVEN_ROWS = 32
SKIPS_FROM = 2.0**24
"""A loss scale at which float16 overflows."""


def adamw(parameters: list[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, **options)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2)


def momentum(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


class Reporting(torch.optim.SGD):
    """A subclass that calls its parent's step, which torch wraps too where a plain SGD was made."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return super().step(closure)


def of_a_subclass(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """`Reporting`, behind a plain optimizer of the parent class."""
    sgd(parameters)
    return Reporting(parameters, lr=1e-2)


def by_hand(model: nn.Module) -> nn.Module:
    """No wrapper: the loop itself broadcasts buffers and reduces gradients."""
    return model


def ddp_with(**options: Any) -> Callable[[nn.Module], nn.Module]:
    return lambda model: DistributedDataParallel(model, **options)


def permuted(model: nn.Module) -> nn.Module:
    """By hand, with the gradients of all matrices as columns: dense, and not in torch's order."""
    for p in model.parameters():
        if p.dim() == 2 and p.requires_grad:
            p.data = p.data.t().contiguous().t()
    return model


def falling(step: int) -> float:
    return 1e-2 / step


def warm_up(step: int) -> float:
    return 1e-3 * min(step - 1, 10)


@dataclass(frozen=True)
class RightLoop:
    """How a loop is built and run; `told` is what its watch is told once."""

    model: Callable[[], nn.Module] = Model
    optimizer: Optimizers = adamw
    wrap: Callable[[nn.Module], nn.Module] = DistributedDataParallel
    accumulate: int = 1
    clip: float | None = None
    clip_order: float = 2.0
    clip_apart: bool = False
    clip_value: float | None = None
    rate: Callable[[int], float] | None = None
    set_to_none: bool = True
    zero_module: bool = False
    autocast: torch.dtype | None = None
    scaled: bool = False
    closure: bool = False
    evaluate: bool = False
    ragged: bool = False
    one_seed: bool = False
    told: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, steps: int) -> Seen:
        torch.manual_seed(0)
        run = Run(self, self.model())
        torch.manual_seed(100 + (0 if self.one_seed else dist.get_rank()))
        for step in range(1, steps + 1):
            run.step(step)
        run.watch.close()
        if self.scaled and run.scaler.get_scale() >= SKIPS_FROM * 2 ** (steps / 4):
            raise RuntimeError("the scaler skipped no step")
        return seen_by(run.watch)


class Run:
    """One run of a `RightLoop` on this rank."""

    def __init__(self, how: RightLoop, inner: nn.Module) -> None:
        self.how = how
        self.inner = inner
        self.model = how.wrap(inner)
        self.optimizer = how.optimizer([p for p in inner.parameters() if p.requires_grad])
        self.scaler = torch.amp.GradScaler("cpu", enabled=how.scaled, init_scale=SKIPS_FROM, growth_interval=4)
        told = {**how.told, **({"scaler": self.scaler} if how.scaled else {})}
        self.watch: Watch = andon.watch(self.model, self.optimizer, action=ignore, **told)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def step(self, step: int) -> None:
        if self.how.rate is not None:
            self.set_rate(self.how.rate(step))
        if self.how.closure:
            self.optimizer.step(lambda: float(self.backward(step)))
        else:
            self.backward(step)
            self.scaler.unscale_(self.optimizer)
            self.clip()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        if self.how.evaluate and self.rank == 0:
            self.evaluate()

    def set_rate(self, rate: float) -> None:
        group = self.optimizer.param_groups[0]
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate

    def clip(self) -> None:
        if self.how.clip is not None:
            whole = [p for p in self.model.parameters() if p.requires_grad]
            for part in (whole[:1], whole[1:]) if self.how.clip_apart else (whole,):
                nn.utils.clip_grad_norm_(part, self.how.clip, norm_type=self.how.clip_order)
        if self.how.clip_value is not None:
            nn.utils.clip_grad_value_(self.model.parameters(), self.how.clip_value)

    @torch.no_grad()
    def evaluate(self) -> None:
        self.model.eval()
        self.inner(data()[0])
        self.model.train()

    def backward(self, step: int) -> Tensor:
        zeroed = self.model if self.how.zero_module else self.optimizer
        zeroed.zero_grad(set_to_none=self.how.set_to_none)
        x, y = data()
        rows = len(x) if self.how.ragged and step % 3 == 0 else EVEN_ROWS
        total = torch.zeros(())
        parts = torch.arange(self.rank, rows, self.world).tensor_split(self.how.accumulate)
        for number, part in enumerate(parts, 1):
            self.model.require_backward_grad_sync = number == len(parts)  # type: ignore[assignment]
            total += self.micro_batch(x[part], y[part], rows)
        if self.how.wrap in (by_hand, permuted):
            self.reduce()
        dist.all_reduce(total)
        return total

    def micro_batch(self, x: Tensor, y: Tensor, rows: int) -> Tensor:
        if self.how.wrap in (by_hand, permuted):
            for name, buffer in self.model.named_buffers():
                if name in self.model.state_dict():
                    dist.broadcast(buffer, 0)
        dtype = self.how.autocast
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            share = nn.functional.cross_entropy(self.model(x), y, reduction="sum") / rows
        # The reduction is a mean over ranks.
        self.scaler.scale(share * self.world).backward()
        return share.detach()

    def reduce(self) -> None:
        for p in (p for p in self.model.parameters() if p.requires_grad):
            there = torch.tensor(p.grad is not None, dtype=torch.int32)
            dist.all_reduce(there)
            if there:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                dist.all_reduce(p.grad)
                p.grad /= self.world
