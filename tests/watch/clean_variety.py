"""Right loops by what people use: torch's optimizers, ways to reduce, courses of training."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler as rates

import andon
from tests.watch.clean import Kind, Seen, ignore, seen_by
from tests.watch.clean_communication import Course, Extra, backward, mean, reduced, scored, share
from tests.watch.clean_loops import Optimizers, RightLoop, ddp_with
from tests.watch.clean_models import LayerNormed, Normed
from tests.watch.loop import CLASSES

Backward = Callable[[nn.Module, int], None]

OPTIMIZERS: dict[str, Optimizers] = {
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "Adam, amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "Adam, weight decay": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1),
    "AdamW, maximize": lambda p: torch.optim.AdamW(p, lr=1e-4, maximize=True),
    "AdamW, one by one": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=1e-2),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=1e-2),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
    "RMSprop, centered with momentum": lambda p: torch.optim.RMSprop(p, lr=1e-3, centered=True, momentum=0.9),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=1e-2),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "SGD, Nesterov": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "SGD, weight decay and dampening": lambda p: torch.optim.SGD(
        p, lr=1e-2, momentum=0.9, dampening=0.1, weight_decay=1e-3
    ),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, fused=True),
    "two groups, two rates": lambda p: torch.optim.AdamW([{"params": p[:1], "lr": 1e-3}, {"params": p[1:]}], lr=1e-2),
    "a group without decay": lambda p: torch.optim.AdamW(
        [{"params": p[:1]}, {"params": p[1:], "weight_decay": 0.0}], lr=1e-2
    ),
}
"""Torch's own, each under DDP."""


# ways to reduce, each given the gradients


def flat(gradients: Sequence[Tensor]) -> None:
    bucket = torch.cat([g.reshape(-1) for g in gradients])
    mean([bucket])
    for g, part in zip(gradients, bucket.split([g.numel() for g in gradients]), strict=True):
        g.copy_(part.view_as(g))


def waiting_later(gradients: Sequence[Tensor]) -> None:
    for work in [dist.all_reduce(g, async_op=True) for g in gradients]:
        work.wait()
    for g in gradients:
        g /= dist.get_world_size()


def gathered(gradients: Sequence[Tensor]) -> None:
    for g in gradients:
        parts = [torch.empty_like(g) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, g)
        g.copy_(torch.stack(parts).mean(0))


def through_rank_0(gradients: Sequence[Tensor]) -> None:
    for g in gradients:
        dist.reduce(g, 0)
        dist.broadcast(g, 0)
        g /= dist.get_world_size()


def as_type(dtype: torch.dtype) -> Callable[[Sequence[Tensor]], None]:
    def reduce(gradients: Sequence[Tensor]) -> None:
        for g in gradients:
            other = g.to(dtype)
            mean([other])
            g.copy_(other)

    return reduce


def by_messages(gradients: Sequence[Tensor]) -> None:
    """Around the ring, point to point; each rank adds in order of rank."""
    world, rank = dist.get_world_size(), dist.get_rank()
    for g in gradients:
        parts = [torch.empty_like(g) for _ in range(world)]
        parts[rank] = g.clone()
        for other in (each for each in range(world) if each != rank):
            for work in [dist.isend(parts[rank], other), dist.irecv(parts[other], other)]:
                assert work is not None
                work.wait()
        g.copy_(torch.stack(parts).mean(0))


REDUCTIONS: dict[str, Callable[[Sequence[Tensor]], None]] = {
    "one flat bucket": flat,
    "from the last to the first": lambda gradients: mean(reversed(gradients)),
    "begun together": waiting_later,
    "gathered": gathered,
    "through rank 0": through_rank_0,
    "in float64": as_type(torch.float64),
    "in bfloat16": as_type(torch.bfloat16),
    "point to point": by_messages,
}


# wrappers


def hooked_in_half(model: nn.Module) -> nn.Module:
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return ddp


def hooked_low_rank(model: nn.Module) -> nn.Module:
    ddp = DistributedDataParallel(model)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=4)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return ddp


# courses of training


def _noisy(model: nn.Module, _: object, step: int) -> None:
    stream = torch.Generator().manual_seed(step)
    for p in model.parameters():
        if p.grad is not None:
            p.grad += 1e-3 * torch.randn(p.shape, generator=stream)


@torch.no_grad()
def _bounded(model: nn.Module, *_: object) -> None:
    for p in model.parameters():
        p.clamp_(-2.0, 2.0)


def _scored(model: nn.Module, _: object, step: int) -> None:
    if step % 4 == 0:
        scored(model)


def _rewound(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    if step == 7:
        torch.manual_seed(step)
        nn.init.normal_(model.module.head.weight)  # type: ignore[union-attr]
        optimizer.state.clear()


def by(loss: Callable[[nn.Module, Tensor, Tensor], Tensor]) -> Backward:
    def backward(model: nn.Module, step: int) -> None:
        loss(model, *share(step)).backward()

    return backward


def _mixed(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    other = torch.randperm(len(x))
    logits = model(0.7 * x + 0.3 * x[other])
    return 0.7 * cross_entropy(logits, y) + 0.3 * cross_entropy(logits, y[other])


def _penalised(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(model(x), y) + 1e-3 * sum(p.square().sum() for p in model.parameters())


def _half_square(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return ((model(x) - nn.functional.one_hot(y, CLASSES)) ** 2).mean() / 2


def _twice(model: nn.Module, step: int) -> None:
    x, y = share(step)
    with model.no_sync():  # type: ignore[operator]
        (0.5 * cross_entropy(model(x), y)).backward()
    (0.5 * cross_entropy(model(x), y)).backward()


class Sharpness(torch.optim.SGD):
    """SAM: the gradient is taken where the loss is highest nearby, and used from where the weights were."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        members = [p for group in self.param_groups for p in group["params"]]
        kept = [p.clone() for p in members]
        for p in members:
            p.add_(p.grad, alpha=0.05 / float(p.grad.norm() + 1e-12))
        self.zero_grad()
        with torch.enable_grad():
            closure()
        for p, held in zip(members, kept, strict=True):
            p.copy_(held)
        return super().step()


def sharpness_aware(steps: int) -> Seen:
    """As its authors advise: each rank climbs by its own gradient (`no_sync`), the second gradient is reduced."""
    torch.manual_seed(0)
    model = DistributedDataParallel(LayerNormed())
    optimizer = Sharpness(model.parameters(), lr=0.1, momentum=0.9)
    w = andon.watch(model, optimizer, action=ignore)
    for step in range(steps):
        with model.no_sync():
            backward(model, step)
        optimizer.step(functools.partial(backward, model, step))
        optimizer.zero_grad()
    w.close()
    return seen_by(w)


COURSES: dict[str, Course] = {
    "noise from one stream": Course(before=_noisy),
    "weights kept within bounds": Course(behind=_bounded),
    "evaluation every fourth update": Course(behind=_scored, model=Normed),
    "a layer drawn anew": Course(behind=_rewound),
    "label smoothing": Course(backward=by(lambda model, x, y: cross_entropy(model(x), y, label_smoothing=0.1))),
    "mixed rows": Course(backward=by(_mixed)),
    "penalty in the loss": Course(backward=by(_penalised)),
    "two backward passes": Course(backward=_twice),
    "cosine": Course(scheduled=lambda o: rates.CosineAnnealingLR(o, 50)),
    "one cycle": Course(scheduled=lambda o: rates.OneCycleLR(o, 1e-2, total_steps=2000)),
    "warm restarts": Course(scheduled=lambda o: rates.CosineAnnealingWarmRestarts(o, 7)),
    "steps of the rate": Course(scheduled=lambda o: rates.StepLR(o, 5)),
    "exponential": Course(scheduled=lambda o: rates.ExponentialLR(o, 0.99)),
    "polynomial": Course(scheduled=lambda o: rates.PolynomialLR(o, 2000)),
    "linear warm-up, then cosine": Course(
        scheduled=lambda o: rates.SequentialLR(
            o, [rates.LinearLR(o, 0.01, total_iters=5), rates.CosineAnnealingLR(o, 50)], [5]
        )
    ),
    "cyclic": Course(scheduled=lambda o: rates.CyclicLR(o, 1e-3, 1e-2, 5, cycle_momentum=False)),
}

# matters of choice that once were suspected


def _clip_each(model: nn.Module, *_: object) -> None:
    for p in model.parameters():
        assert p.grad is not None
        p.grad.mul_(min(1.0, 0.01 / (float(p.grad.norm()) + 1e-6)))


def _one_late() -> Extra:
    """Each update applies the previous update's gradient; the first applies its own."""
    held: list[Tensor] = []

    def before(model: nn.Module, _: object, step: int) -> None:
        now = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        for p, gradient in zip(model.parameters(), now if step == 1 else held, strict=True):
            p.grad = gradient.clone()
        held[:] = now

    return before


def _own_beginning() -> Extra:
    """Each rank starts its average from different numbers; the first decay is 0, as in diffusers."""
    held: list[Tensor] = []

    @torch.no_grad()
    def behind(model: nn.Module, _: object, step: int) -> None:
        if step == 1:
            generator = torch.Generator().manual_seed(dist.get_rank())
            held[:] = [torch.randn(p.shape, generator=generator) for p in model.parameters()]
        decay = min(0.99, 1 - step**-0.75)
        for kept, p in zip(held, model.parameters(), strict=True):
            kept.sub_((1 - decay) * (kept - p))

    return behind


def _slow(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


CHOICES: dict[str, Course] = {
    "half the mean square": Course(backward=by(_half_square), optimizer=_slow),
    "each parameter clipped by hand": Course(before=_clip_each, optimizer=_slow),
    "gradients applied one update late": Course(before=_one_late(), optimizer=_slow),
    "average begun from each rank's own numbers": Course(behind=_own_beginning(), optimizer=_slow),
}

WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "float16 on the way": hooked_in_half,
    "factors on the way": hooked_low_rank,
    "buckets of one tensor": ddp_with(bucket_cap_mb=1e-5),
    "a group of its own": lambda model: DistributedDataParallel(model, process_group=dist.new_group()),
}
"""Further kinds of DDP."""

KINDS = {
    **{f"DDP, {name}": Kind(RightLoop(optimizer=make), weight="many") for name, make in OPTIMIZERS.items()},
    **{f"plain loop, reduced: {name}": Kind(reduced(reduce), weight="many") for name, reduce in REDUCTIONS.items()},
    **{f"DDP, {name}": Kind(RightLoop(wrap=wrap), weight="many") for name, wrap in WRAPPERS.items()},
    **{f"DDP, {name}": Kind(course, weight="many") for name, course in COURSES.items()},
    **{name: Kind(loop) for name, loop in CHOICES.items()},
    "DDP, sharpness-aware": Kind(sharpness_aware, weight="many"),
}
