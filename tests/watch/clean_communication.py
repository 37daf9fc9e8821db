"""Right loops by how their ranks come to agree: inside an optimizer's step, with sharded states, now and then, through
wrappers that stand inside of other modules, beside copies that nobody trains.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import andon
from tests.watch.clean import Seen, ignore, seen_by
from tests.watch.clean_loops import adamw, by_hand, momentum, sgd
from tests.watch.clean_models import LayerNormed, Normed
from tests.watch.loop import data

Optimizers = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
ROWS = 32


def share(step: int = 0) -> tuple[Tensor, Tensor]:
    x, y = data()
    mine = (torch.arange(dist.get_rank(), ROWS, dist.get_world_size()) + step) % len(x)
    return x[mine], y[mine]


def backward(model: nn.Module, step: int = 0) -> None:
    x, y = share(step)
    nn.functional.cross_entropy(model(x), y).backward()


@torch.no_grad()
def mean(tensors: Iterable[Tensor | None]) -> None:
    for each in tensors:
        if each is not None:
            dist.all_reduce(each)
            each /= dist.get_world_size()


Extra = Callable[[nn.Module, torch.optim.Optimizer, int], None]


@dataclass(frozen=True)
class Course:
    """A loop with an extra action before or after the optimizer's step; both get the wrapped module."""

    before: Extra = lambda *_: None
    behind: Extra = lambda *_: None
    backward: Callable[[nn.Module, int], None] = backward
    model: Callable[[], nn.Module] = LayerNormed
    optimizer: Optimizers = adamw
    scheduled: Callable[[torch.optim.Optimizer], Any] | None = None
    wrap: Callable[[nn.Module], nn.Module] = DistributedDataParallel

    def __call__(self, steps: int) -> Seen:
        torch.manual_seed(0)
        inner = self.model()
        model = self.wrap(inner)
        optimizer = self.optimizer([p for p in inner.parameters() if p.requires_grad])
        schedule = None if self.scheduled is None else self.scheduled(optimizer)
        w = andon.watch(model, optimizer, action=ignore)
        torch.manual_seed(100 + dist.get_rank())
        for step in range(1, steps + 1):
            optimizer.zero_grad()
            self.backward(model, step)
            self.before(model, optimizer, step)
            optimizer.step()
            self.behind(model, optimizer, step)
            if schedule is not None:
                schedule.step()
        w.close()
        return seen_by(w)


def reduced(reduce: Callable[[Sequence[nn.Parameter]], None]) -> Course:
    """A loop without a wrapper that reduces its gradients by `reduce`."""

    @torch.no_grad()
    def before(model: nn.Module, *_: object) -> None:
        reduce(list(model.parameters()))

    return Course(before=before, wrap=by_hand, optimizer=momentum)


# optimizers that communicate inside their step


class Dealt(torch.optim.Optimizer):
    """Reduces gradients itself; each parameter is updated by one rank, which alone has its momentum, and sent on.

    ahead: the loop reduces the gradients. So do the optimizers of the Muon family.
    """

    def __init__(self, parameters: list[nn.Parameter], *, ahead: bool = False) -> None:
        super().__init__(parameters, {"lr": 1e-2})
        self.ahead = ahead

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        members = [p for p in self.param_groups[0]["params"] if p.grad is not None]
        for index, p in enumerate(members):
            owner = index % dist.get_world_size()
            if not self.ahead:
                mean([p.grad])
            if owner == dist.get_rank():
                kept = self.state[p]
                kept["momentum"] = 0.9 * kept.get("momentum", torch.zeros_like(p)) + p.grad
                p.sub_(self.param_groups[0]["lr"] * kept["momentum"])
            dist.broadcast(p, owner)


class Sliced(torch.optim.Optimizer):
    """Each rank has the moments of a slice of every parameter, updates it, and gathers the others'."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if p.grad is None:
                continue
            world, rank = dist.get_world_size(), dist.get_rank()
            size = -(-p.numel() // world)
            whole = nn.functional.pad(p.grad.reshape(-1), (0, size * world - p.numel()))
            mean([whole])
            mine = whole[rank * size : (rank + 1) * size]
            kept = self.state[p]
            kept["square"] = 0.9 * kept.get("square", torch.zeros_like(mine)) + 0.1 * mine.square()
            made = mine / (kept["square"].sqrt() + 1e-8)
            parts = [torch.empty_like(made) for _ in range(world)]
            dist.all_gather(parts, made)
            p.sub_(self.param_groups[0]["lr"] * torch.cat(parts)[: p.numel()].view_as(p))


def dealt(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return Dealt(parameters)


def dealt_behind(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return Dealt(parameters, ahead=True)


def zero_redundancy(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=1e-2)


def inside_step(optimizer: Optimizers, clip: float | None = None) -> Course:
    """A plain loop that leaves the reduction to its optimizer."""

    def before(model: nn.Module, *_: object) -> None:
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)

    return Course(before=before, wrap=by_hand, optimizer=optimizer)


# weights that part and are brought together


@dataclass(frozen=True)
class Parting:
    """Local SGD: each rank by itself, and every few updates the mean of the weights.

    by: how the mean is written. warm_up: updates with reduced gradients at the beginning. wrapped: through DDP, told
    not to reduce. within: whether the optimizer's own step does it.
    """

    every: int = 4
    by: Literal["weights", "data", "copy"] = "weights"
    warm_up: int = 0
    wrapped: bool = False
    model: Callable[[], nn.Module] = Normed
    optimizer: Optimizers = momentum

    def __call__(self, steps: int) -> Seen:
        torch.manual_seed(0)
        inner = self.model()
        model = DistributedDataParallel(inner) if self.wrapped else inner
        optimizer = self.optimizer(list(inner.parameters()))
        w = andon.watch(model, optimizer, action=ignore)
        torch.manual_seed(100 + dist.get_rank())
        for step in range(1, steps + 1):
            optimizer.zero_grad()
            alone = step > self.warm_up
            with model.no_sync() if self.wrapped and alone else contextlib.nullcontext():  # type: ignore[operator]
                backward(model, step)
            if not alone and not self.wrapped:
                mean(p.grad for p in inner.parameters())
            optimizer.step()
            if alone and step % self.every == 0:
                self.bring_together(inner)
        w.close()
        return seen_by(w)

    @torch.no_grad()
    def bring_together(self, model: nn.Module) -> None:
        for p in model.parameters():
            if self.by == "copy":
                found = p.detach().clone()
                mean([found])
                p.copy_(found)
            else:
                mean([p.data if self.by == "data" else p])


class Averaging(torch.optim.SGD):
    """Local SGD inside of the optimizer's step."""

    made = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        found = super().step(closure)
        self.made += 1
        if self.made % 3 == 0:
            mean(p.data for group in self.param_groups for p in group["params"])
        return found


def averaging(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return Averaging(parameters, lr=1e-2)


def post_local(steps: int) -> Seen:
    """Torch's own: a communication hook that reduces at first, and an optimizer that brings weights together."""
    torch.manual_seed(0)
    inner = LayerNormed()
    model = DistributedDataParallel(inner)
    alone, _ = dist.new_subgroups(group_size=1)
    model.register_comm_hook(PostLocalSGDState(None, alone, start_localSGD_iter=5), post_localSGD_hook)
    averager = PeriodicModelAverager(period=4, warmup_steps=5)
    optimizer = PostLocalSGDOptimizer(sgd(list(inner.parameters())), averager)
    w = andon.watch(model, optimizer, action=ignore)
    for step in range(steps):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
    w.close()
    return seen_by(w)


# wrappers inside of modules, and copies that nobody trains


class Task(nn.Module):
    """Holds the wrapped model, and an average of it that an evaluation uses."""

    def __init__(self, inner: nn.Module, *, frozen: bool) -> None:
        super().__init__()
        self.average = copy.deepcopy(inner).requires_grad_(not frozen)
        self.model = DistributedDataParallel(inner)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)

    @torch.no_grad()
    def follow(self) -> None:
        for kept, now in zip(self.average.parameters(), self.model.module.parameters(), strict=True):
            kept.lerp_(now, 0.1)
        for held, own in zip(self.average.buffers(), self.model.module.buffers(), strict=True):
            held.copy_(own)


@dataclass(frozen=True)
class Holding:
    """The watch is given the module that holds the wrapped one. on: the ranks whose average follows."""

    frozen: bool = True
    on: tuple[int, ...] = (0, 1)
    optimizer: Optimizers = momentum
    given: Literal["holder", "wrapped", "inner"] = "holder"

    def __call__(self, steps: int) -> Seen:
        torch.manual_seed(0)
        task = Task(Normed(), frozen=self.frozen)
        optimizer = self.optimizer(list(task.model.parameters()))
        given = {"holder": task, "wrapped": task.model, "inner": task.model.module}[self.given]
        w = andon.watch(given, optimizer, action=ignore)
        torch.manual_seed(100 + dist.get_rank())
        for step in range(steps):
            optimizer.zero_grad()
            backward(task, step)
            optimizer.step()
            if dist.get_rank() in self.on:
                task.follow()
        w.close()
        return seen_by(w)


class Rivals(nn.Module):
    """A generator and a critic, each in a wrapper of its own."""

    def __init__(self) -> None:
        super().__init__()
        makes = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8))
        self.makes, self.judges = DistributedDataParallel(makes), DistributedDataParallel(nn.Linear(8, 1))


def rivals(steps: int) -> Seen:
    """Two wrapped modules in one holder, trained in turn within each step."""
    torch.manual_seed(0)
    both = Rivals()
    makes, judges = (adamw(list(each.parameters())) for each in (both.makes, both.judges))
    w = andon.watch(both, [makes, judges], action=ignore)
    torch.manual_seed(100 + dist.get_rank())
    for step in range(steps):
        real = share(step)[0]
        judges.zero_grad()
        made = both.makes(torch.randn(len(real), 4)).detach()
        (nn.functional.softplus(both.judges(made)) + nn.functional.softplus(-both.judges(real))).mean().backward()
        judges.step()
        makes.zero_grad()
        both.judges.requires_grad_(False)
        nn.functional.softplus(-both.judges(both.makes(torch.randn(len(real), 4)))).mean().backward()
        both.judges.requires_grad_(True)
        makes.step()
    w.close()
    return seen_by(w)


class Student(nn.Module):
    """A model, and one of the same layout that follows it: a momentum encoder, a mean teacher."""

    def __init__(self, follow: Callable[[nn.Module, nn.Module], None], *, within: bool) -> None:
        super().__init__()
        self.student = LayerNormed()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.follow, self.within = follow, within

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            if self.within:
                self.follow(self.teacher, self.student)
            wanted = self.teacher(x)
        logits: Tensor = self.student(x)
        return logits + 0.1 * wanted


@torch.no_grad()
def in_place(teacher: nn.Module, student: nn.Module) -> None:
    for kept, now in zip(teacher.parameters(), student.parameters(), strict=True):
        kept.lerp_(now, 0.1)


@torch.no_grad()
def by_new_data(teacher: nn.Module, student: nn.Module) -> None:
    for kept, now in zip(teacher.parameters(), student.parameters(), strict=True):
        kept.data = kept.data * 0.9 + now.data * 0.1


def taught(every: int = 1, follow: Callable[[nn.Module, nn.Module], None] = in_place) -> Course:
    """A teacher inside of the model, in one wrapper. every: after so many updates it follows; 0: in forward passes."""

    def behind(model: nn.Module, _: object, step: int) -> None:
        if every and step % every == 0:
            follow(model.module.teacher, model.module.student)  # type: ignore[arg-type]

    return Course(model=lambda: Student(follow, within=not every), optimizer=momentum, behind=behind)


class Merged(nn.Module):
    """A frozen matrix and an adapter beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 3).requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 3, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))

    @torch.no_grad()
    def merge(self) -> None:
        self.base.weight += self.up.weight @ self.down.weight
        nn.init.kaiming_uniform_(self.down.weight)
        nn.init.zeros_(self.up.weight)


def merged(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Every fifth update the adapter is merged, alike on all ranks, and the moments begin anew."""
    if step % 5 == 0:
        torch.manual_seed(step)
        model.module.merge()  # type: ignore[operator, union-attr]
        optimizer.state.clear()
