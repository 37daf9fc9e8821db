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
from tests.watch.clean import Kind, Seen, ignore, seen_by
from tests.watch.clean_loops import RightLoop, adamw, by_hand, momentum, sgd
from tests.watch.clean_models import LayerNormed, Normed
from tests.watch.loop import Model, data

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


@torch.no_grad()
def follow(kept: nn.Module, now: nn.Module) -> None:
    for own, other in zip(kept.parameters(), now.parameters(), strict=True):
        own.lerp_(other, 0.1)


Extra = Callable[[nn.Module, Any, int], None]


@dataclass(frozen=True)
class Course:
    """A loop with an extra action before or after the optimizer's step; both get the wrapped module.

    given: what of the wrapped module the watch is given. optimizer: one, or several that step together.
    """

    before: Extra = lambda *_: None
    behind: Extra = lambda *_: None
    backward: Callable[[nn.Module, int], None] = backward
    model: Callable[[], nn.Module] = LayerNormed
    optimizer: Callable[[list[nn.Parameter]], Any] = adamw
    scheduled: Callable[[torch.optim.Optimizer], Any] | None = None
    wrap: Callable[[nn.Module], nn.Module] = DistributedDataParallel
    given: Callable[[Any], nn.Module] = lambda model: model

    def __call__(self, steps: int) -> Seen:
        torch.manual_seed(0)
        inner = self.model()
        model = self.wrap(inner)
        optimizer = self.optimizer([p for p in inner.parameters() if p.requires_grad])
        every = optimizer if isinstance(optimizer, list) else [optimizer]
        schedule = None if self.scheduled is None else self.scheduled(optimizer)
        w = andon.watch(self.given(model), optimizer, action=ignore)
        torch.manual_seed(100 + dist.get_rank())
        for step in range(1, steps + 1):
            for each in every:
                each.zero_grad()
            self.backward(model, step)
            self.before(model, optimizer, step)
            for each in every:
                each.step()
            self.behind(model, optimizer, step)
            if schedule is not None:
                schedule.step()
        w.close()
        return seen_by(w)


def reduced(reduce: Callable[[Sequence[Tensor]], None]) -> Course:
    @torch.no_grad()
    def before(model: nn.Module, *_: object) -> None:
        reduce([p.grad for p in model.parameters() if p.grad is not None])

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


def dealt_behind(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return Dealt(parameters, ahead=True)


def clipping(model: nn.Module, *_: object) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


# weights that part and are brought together


def parting(
    every: int = 4,
    by: Literal["weights", "data", "copy"] = "weights",
    warm_up: int = 0,
    wrapped: bool = False,
    **parts: Any,
) -> Course:
    """Local SGD: each rank by itself, and every few updates the mean of the weights.

    by: how the mean is written. warm_up: updates with reduced gradients at the beginning. wrapped: through DDP, told
    not to reduce.
    """

    def apart(model: Any, step: int) -> None:
        with model.no_sync() if wrapped and step > warm_up else contextlib.nullcontext():
            backward(model, step)
        if step <= warm_up and not wrapped:
            mean(p.grad for p in model.parameters())

    @torch.no_grad()
    def together(model: nn.Module, _: object, step: int) -> None:
        if step <= warm_up or step % every:
            return
        for p in model.parameters():
            if by == "copy":
                found = p.detach().clone()
                mean([found])
                p.copy_(found)
            else:
                mean([p.data if by == "data" else p])

    wrap = DistributedDataParallel if wrapped else by_hand
    return Course(backward=apart, behind=together, wrap=wrap, **{"model": Normed, "optimizer": momentum, **parts})


class Averaging(torch.optim.SGD):
    made = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        found = super().step(closure)
        self.made += 1
        if self.made % 3 == 0:
            mean(p.data for group in self.param_groups for p in group["params"])
        return found


def _reduced_at_first(inner: nn.Module) -> nn.Module:
    model = DistributedDataParallel(inner)
    alone, _ = dist.new_subgroups(group_size=1)
    model.register_comm_hook(PostLocalSGDState(None, alone, start_localSGD_iter=5), post_localSGD_hook)
    return model


def _bringing_together(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return PostLocalSGDOptimizer(sgd(parameters), PeriodicModelAverager(period=4, warmup_steps=5))


post_local = Course(wrap=_reduced_at_first, optimizer=_bringing_together)
"""Torch's own: a communication hook that reduces at first, and an optimizer that brings weights together."""


# wrappers inside of modules, and copies that nobody trains


class Task(nn.Module):
    """Holds the wrapped model, and an average of it that an evaluation uses."""

    def __init__(self, inner: nn.Module, *, frozen: bool) -> None:
        super().__init__()
        self.average = copy.deepcopy(inner).requires_grad_(not frozen)
        self.model = DistributedDataParallel(inner)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


def holding(frozen: bool = True, on: tuple[int, ...] = (0, 1), **parts: Any) -> Course:
    """The watch is given the module that holds the wrapped one. on: the ranks whose average follows."""

    def behind(task: Any, *_: object) -> None:
        if dist.get_rank() in on:
            follow(task.average, task.model.module)
            for held, own in zip(task.average.buffers(), task.model.module.buffers(), strict=True):
                held.copy_(own)

    wrap = lambda inner: Task(inner, frozen=frozen)  # noqa: E731
    return Course(model=Normed, wrap=wrap, optimizer=momentum, behind=behind, **parts)


def averaged() -> Course:
    """An average of the weights and buffers, which takes the place of the weights while it is evaluated."""
    held: list[nn.Module] = []

    @torch.no_grad()
    def behind(model: Any, _: object, step: int) -> None:
        if step == 1:
            held[:] = [copy.deepcopy(model.module)]
        follow(held[0], model.module)
        if step % 5 == 0:
            own = copy.deepcopy(model.module.state_dict())
            model.module.load_state_dict(held[0].state_dict())
            scored(model)
            model.module.load_state_dict(own)

    return Course(model=Normed, behind=behind)


@torch.no_grad()
def scored(model: Any) -> None:
    model.eval()
    model.module(data()[0])
    model.train()


def _critic_loss(critic: nn.Module, made: Tensor, real: Tensor) -> Tensor:
    return (nn.functional.softplus(critic(made)) + nn.functional.softplus(-critic(real))).mean()


def rivals(steps: int) -> Seen:
    """Two wrapped modules in one holder, trained in turn within each step."""
    torch.manual_seed(0)
    maker = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8))
    both = nn.ModuleList(DistributedDataParallel(each) for each in (maker, nn.Linear(8, 1)))
    maker, critic = both
    makes, judges = (adamw(list(each.parameters())) for each in both)
    w = andon.watch(both, [makes, judges], action=ignore)
    torch.manual_seed(100 + dist.get_rank())
    for step in range(steps):
        real = share(step)[0]
        judges.zero_grad()
        _critic_loss(critic, maker(torch.randn(len(real), 4)).detach(), real).backward()
        judges.step()
        makes.zero_grad()
        critic.requires_grad_(False)
        nn.functional.softplus(-critic(maker(torch.randn(len(real), 4)))).mean().backward()
        critic.requires_grad_(True)
        makes.step()
    w.close()
    return seen_by(w)


def alternating(steps: int) -> Seen:
    """Two optimizers in turn, the critic's twice as often; the generator's loss leaves gradients in the critic."""
    torch.manual_seed(0)
    maker = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8))
    critic = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizers = [adamw(list(part.parameters())) for part in (maker, critic)]
    model = nn.Sequential(maker, critic)
    w = andon.watch(model, optimizers, action=ignore)
    torch.manual_seed(100 + dist.get_rank())
    for step in range(1, steps + 1):
        real, _ = share()
        noise, turn = torch.randn(len(real), 4), int(step % 3 > 0)
        optimizers[turn].zero_grad()
        if turn == 0:
            nn.functional.softplus(-model(noise)).mean().backward()
        else:
            with torch.no_grad():
                made = maker(noise)
            _critic_loss(critic, made, real).backward()
        mean(p.grad for p in model[turn].parameters())
        optimizers[turn].step()
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
def by_new_data(teacher: nn.Module, student: nn.Module) -> None:
    for kept, now in zip(teacher.parameters(), student.parameters(), strict=True):
        kept.data = kept.data * 0.9 + now.data * 0.1


def taught(every: int = 1, follow: Callable[[nn.Module, nn.Module], None] = follow) -> Course:
    """A teacher inside of the model, in one wrapper. every: after so many updates it follows; 0: in forward passes."""

    def behind(model: Any, _: object, step: int) -> None:
        if every and step % every == 0:
            follow(model.module.teacher, model.module.student)

    return Course(model=lambda: Student(follow, within=not every), optimizer=momentum, behind=behind)


class Merged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 3).requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 3, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


@torch.no_grad()
def merged(model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Every fifth update the adapter is merged, alike on all ranks, and the moments begin anew."""
    if step % 5 == 0:
        torch.manual_seed(step)
        inner = model.module
        inner.base.weight += inner.up.weight @ inner.down.weight
        nn.init.kaiming_uniform_(inner.down.weight)
        nn.init.zeros_(inner.up.weight)
        optimizer.state.clear()


PARTS: dict[str, Course] = {
    "local SGD": parting(),
    "local SGD, every update": parting(every=1),
    "local SGD, through .data": parting(by="data"),
    "local SGD, copied back": parting(by="copy", every=7),
    "local SGD, AdamW": parting(optimizer=adamw),
    "local SGD, no_sync of DDP": parting(wrapped=True),
    "local SGD behind a reduced warm-up": parting(warm_up=6, model=LayerNormed),
    "local SGD behind a reduced warm-up, DDP": parting(warm_up=6, wrapped=True),
    "local SGD inside the optimizer's step": parting(every=10**9, optimizer=lambda p: Averaging(p, lr=1e-2)),
    "PostLocalSGDOptimizer": post_local,
}
"""Loops whose weights part, of which at first one suspicion is said."""

LOOPS: dict[str, Callable[[int], Seen]] = {
    "average of weights": averaged(),
    "two optimizers": Course(model=Model, optimizer=lambda p: [adamw(p[:2]), momentum(p[2:])]),
    "two optimizers in turn": alternating,
    "step that reduces and deals out parameters": Course(wrap=by_hand, optimizer=Dealt),
    "step that reduces and deals out parameters, clipping": Course(wrap=by_hand, optimizer=Dealt, before=clipping),
    "step that deals out parameters, DDP": RightLoop(optimizer=dealt_behind),
    "step that deals out parameters, reduced by hand": RightLoop(optimizer=dealt_behind, wrap=by_hand),
    "step that reduces and deals out slices": Course(wrap=by_hand, optimizer=Sliced),
    "step that deals out slices, DDP": RightLoop(optimizer=Sliced),
    "ZeroRedundancyOptimizer": RightLoop(optimizer=lambda p: ZeroRedundancyOptimizer(p, torch.optim.AdamW, lr=1e-2)),
    "DDP inside a task, with an average": holding(),
    "DDP inside a task, with an average that has gradients": holding(frozen=False),
    "DDP inside a task, the inner module watched": holding(given=lambda task: task.model.module),
    "two wrapped modules in one, adversaries": rivals,
    "mean teacher in the model": taught(),
    "mean teacher in the model, every third update": taught(every=3),
    "momentum encoder, moved in the forward pass": taught(every=0),
    "momentum encoder, by new data": taught(every=0, follow=by_new_data),
    "ReLoRA": Course(model=Merged, behind=merged),
}
KINDS = {
    **{name: Kind(loop, suspected=frozenset({"replicas-agree"})) for name, loop in PARTS.items()},
    **{name: Kind(loop) for name, loop in LOOPS.items()},
    "DDP inside a task, average on rank 0": Kind(holding(on=(0,))),
}
