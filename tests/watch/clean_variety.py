"""Right loops by what people use: torch's optimizers, ways to reduce, kinds of layers, courses of training."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler as rates

from tests.watch.clean_communication import Course, Extra, backward, mean, share
from tests.watch.clean_models import WIDTH, Normed
from tests.watch.loop import CLASSES, FEATURES

Optimizers = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


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


# ways to reduce


def flat(parameters: Sequence[nn.Parameter]) -> None:
    gradients = [p.grad for p in parameters if p.grad is not None]
    bucket = torch.cat([g.reshape(-1) for g in gradients])
    mean([bucket])
    for g, part in zip(gradients, bucket.split([g.numel() for g in gradients]), strict=True):
        g.copy_(part.view_as(g))


def in_turn(parameters: Sequence[nn.Parameter]) -> None:
    mean(p.grad for p in reversed(parameters))


def waiting_later(parameters: Sequence[nn.Parameter]) -> None:
    works = [dist.all_reduce(p.grad, async_op=True) for p in parameters if p.grad is not None]
    for work in works:
        work.wait()
    for p in parameters:
        if p.grad is not None:
            p.grad /= dist.get_world_size()


def gathered(parameters: Sequence[nn.Parameter]) -> None:
    """Every rank has all gradients, and takes their mean in order of rank."""
    for p in parameters:
        if p.grad is not None:
            parts = [torch.empty_like(p.grad) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, p.grad)
            p.grad = torch.stack(parts).mean(0)


def through_rank_0(parameters: Sequence[nn.Parameter]) -> None:
    for p in parameters:
        if p.grad is not None:
            dist.reduce(p.grad, 0)
            dist.broadcast(p.grad, 0)
            p.grad /= dist.get_world_size()


def in_double(parameters: Sequence[nn.Parameter]) -> None:
    for p in parameters:
        if p.grad is not None:
            wide = p.grad.double()
            mean([wide])
            p.grad.copy_(wide)


def in_halves(parameters: Sequence[nn.Parameter]) -> None:
    for p in parameters:
        if p.grad is not None:
            narrow = p.grad.bfloat16()
            mean([narrow])
            p.grad.copy_(narrow)


def by_messages(parameters: Sequence[nn.Parameter]) -> None:
    """Around the ring, point to point; each rank adds in order of rank."""
    world, rank = dist.get_world_size(), dist.get_rank()
    for p in parameters:
        if p.grad is None:
            continue
        parts = [torch.empty_like(p.grad) for _ in range(world)]
        parts[rank] = p.grad.clone()
        for other in range(world):
            if other != rank:
                works = [dist.isend(parts[rank], other), dist.irecv(parts[other], other)]
                for work in works:
                    assert work is not None
                    work.wait()
        p.grad.copy_(torch.stack(parts).mean(0))


REDUCTIONS: dict[str, Callable[[Sequence[nn.Parameter]], None]] = {
    "one flat bucket": flat,
    "from the last to the first": in_turn,
    "begun together": waiting_later,
    "gathered": gathered,
    "through rank 0": through_rank_0,
    "in float64": in_double,
    "in bfloat16": in_halves,
    "point to point": by_messages,
}


# wrappers


def hooked_in_half(model: nn.Module) -> nn.Module:
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return ddp


def hooked_low_rank(model: nn.Module) -> nn.Module:
    """DDP that sends factors of the gradients, and keeps what they leave out."""
    ddp = DistributedDataParallel(model)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=4)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return ddp


def own_buffers(model: nn.Module) -> nn.Module:
    """DDP that leaves each rank its own statistics, on purpose."""
    return DistributedDataParallel(model, broadcast_buffers=False)


def small_buckets(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, bucket_cap_mb=1e-5)  # type: ignore[arg-type]


def in_another_group(model: nn.Module) -> nn.Module:
    """DDP in a group of all ranks that is not the first one."""
    return DistributedDataParallel(model, process_group=dist.new_group())


# layers


class Convolved(nn.Module):
    """Convolution, pooling and batch statistics, in the order of channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 2))
        self.net.to(memory_format=torch.channels_last)
        self.head = nn.Linear(4 * 3, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        image = x.view(len(x), 1, 2, FEATURES // 2).contiguous(memory_format=torch.channels_last)
        return self.head(self.net(image).flatten(1))


class Recurrent(nn.Module):
    """An LSTM over the features."""

    def __init__(self) -> None:
        super().__init__()
        self.cells, self.head = nn.LSTM(1, 6, num_layers=2, dropout=0.1), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cells(x.t()[:, :, None])[0][-1])


class Attending(nn.Module):
    """Attention over the features, with learned positions."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.randn(FEATURES, WIDTH))
        self.blocks = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, batch_first=True), 2, enable_nested_tensor=False
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x[:, :, None] * self.place).mean(1))


class Embedding(nn.Module):
    """Words whose rows get dense gradients, with padding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(5, WIDTH, padding_idx=0), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.words((x * 2).round().long().clamp(0, 4)).mean(1))


def _layered(*layers: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*(make() for make in layers))


def _head() -> nn.Module:
    return nn.Linear(WIDTH, CLASSES)


def _first() -> nn.Module:
    return nn.Linear(FEATURES, WIDTH)


class Chosen(nn.Module):
    """Two experts, of which each row takes one, by a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(FEATURES, 2)
        self.experts = nn.ModuleList(nn.Linear(FEATURES, CLASSES) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(1)
        made = torch.stack([expert(x) for expert in self.experts], 1)
        return (made * (weights * (weights == weights.max(1, keepdim=True)[0]))[:, :, None]).sum(1)


class PartlyFrozen(nn.Module):
    """A frozen first layer, batch statistics in evaluation mode, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(FEATURES, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, CLASSES)
        self.first.requires_grad_(False)

    def train(self, mode: bool = True) -> PartlyFrozen:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.norm(self.first(x))))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "convolutions, channels last": Convolved,
    "LSTM": Recurrent,
    "transformer encoder": Attending,
    "embedding with padding": Embedding,
    "experts by a gate": Chosen,
    "frozen statistics": lambda: PartlyFrozen().train(),
    "group norm": _layered(_first, lambda: nn.GroupNorm(4, WIDTH), nn.Tanh, _head),
    "RMS norm": _layered(_first, lambda: nn.RMSNorm(WIDTH), nn.Tanh, _head),
    "spectral norm": _layered(lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(FEATURES, WIDTH)), _head),
    "weight norm": _layered(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(FEATURES, WIDTH)), _head),
    "orthogonal": _layered(lambda: nn.utils.parametrizations.orthogonal(nn.Linear(FEATURES, WIDTH)), _head),
    "PReLU": _layered(_first, nn.PReLU, _head),
    "GELU, dropout": _layered(_first, nn.GELU, lambda: nn.Dropout(0.3), _head),
    "batch norm without statistics": _layered(
        _first, lambda: nn.BatchNorm1d(WIDTH, track_running_stats=False), nn.Tanh, _head
    ),
    "instance norm": _layered(
        _first, lambda: nn.Unflatten(1, (4, 4)), lambda: nn.InstanceNorm1d(4, affine=True), nn.Flatten, _head
    ),
    "a layer called twice": lambda: _Squared(),
}


class _Squared(nn.Module):
    """One layer called twice in a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(FEATURES, FEATURES)
        self.pairs = nn.Bilinear(FEATURES, FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.both(x))
        return self.pairs(hidden, torch.tanh(self.both(hidden)))


# courses of training


def _noisy(model: nn.Module, _: object, step: int) -> None:
    stream = torch.Generator().manual_seed(step)
    for p in model.parameters():
        if p.grad is not None:
            p.grad += 1e-3 * torch.randn(p.shape, generator=stream)


def _centred(model: nn.Module, *_: object) -> None:
    for p in model.parameters():
        if p.grad is not None and p.dim() > 1:
            p.grad -= p.grad.mean(dim=1, keepdim=True)


@torch.no_grad()
def _bounded(model: nn.Module, *_: object) -> None:
    for p in model.parameters():
        p.clamp_(-2.0, 2.0)


@torch.no_grad()
def _scored(model: nn.Module, _: object, step: int) -> None:
    if step % 4 == 0:
        model.eval()
        model(share(step)[0])
        model.train()


def _saved_and_back(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    if step % 5 == 0:
        weights, moments = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        model.load_state_dict(weights)
        optimizer.load_state_dict(moments)


def _rewound(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """All ranks go back to the same draw of one layer, and its moments begin anew."""
    if step == 7:
        torch.manual_seed(step)
        nn.init.normal_(model.module.head.weight)  # type: ignore[union-attr]
        optimizer.state.clear()


def _smoothed(model: nn.Module, step: int) -> None:
    x, y = share(step)
    nn.functional.cross_entropy(model(x), y, label_smoothing=0.1).backward()


def _mixed(model: nn.Module, step: int) -> None:
    x, y = share(step)
    other = torch.randperm(len(x))
    logits = model(0.7 * x + 0.3 * x[other])
    (0.7 * nn.functional.cross_entropy(logits, y) + 0.3 * nn.functional.cross_entropy(logits, y[other])).backward()


def _penalised(model: nn.Module, step: int) -> None:
    x, y = share(step)
    loss = nn.functional.cross_entropy(model(x), y)
    (loss + 1e-3 * sum(p.square().sum() for p in model.parameters())).backward()


def _twice(model: nn.Module, step: int) -> None:
    x, y = share(step)
    with model.no_sync():  # type: ignore[operator]
        (0.5 * nn.functional.cross_entropy(model(x), y)).backward()
    (0.5 * nn.functional.cross_entropy(model(x), y)).backward()


def _sharpness_aware(model: nn.Module, step: int) -> None:
    """A gradient, a step uphill, the gradient there, and back."""
    backward(model, step)
    moved = [(p, 0.01 * p.grad.sign()) for p in model.parameters() if p.grad is not None]
    with torch.no_grad():
        for p, e in moved:
            p += e
    model.zero_grad()
    backward(model, step)
    with torch.no_grad():
        for p, e in moved:
            p -= e


def _looking_ahead(every: int) -> Extra:
    slow: list[Tensor] = []

    @torch.no_grad()
    def behind(model: nn.Module, _: object, step: int) -> None:
        if step == 1:
            slow[:] = [p.clone() for p in model.parameters()]
        if step % every == 0:
            for kept, p in zip(slow, model.parameters(), strict=True):
                kept.lerp_(p, 0.5)
                p.copy_(kept)

    return behind


COURSES: dict[str, Course] = {
    "noise from one stream": Course(before=_noisy),
    "centred gradients": Course(before=_centred),
    "weights kept within bounds": Course(behind=_bounded),
    "evaluation every fourth update": Course(behind=_scored, model=Normed),
    "saved and loaded in place": Course(behind=_saved_and_back),
    "a layer drawn anew": Course(behind=_rewound),
    "label smoothing": Course(backward=_smoothed),
    "mixed rows": Course(backward=_mixed),
    "penalty in the loss": Course(backward=_penalised),
    "two backward passes": Course(backward=_twice),
    "sharpness-aware": Course(backward=_sharpness_aware),
    "lookahead": Course(behind=_looking_ahead(5)),
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


def _half_square(model: nn.Module, step: int) -> None:
    """Half the mean square, as regressions write it."""
    x, y = share(step)
    (((model(x) - nn.functional.one_hot(y, CLASSES)) ** 2).mean() / 2).backward()


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
    "half the mean square": Course(backward=_half_square, optimizer=_slow),
    "each parameter clipped by hand": Course(before=_clip_each, optimizer=_slow),
    "gradients applied one update late": Course(before=_one_late(), optimizer=_slow),
    "average begun from each rank's own numbers": Course(behind=_own_beginning(), optimizer=_slow),
}

WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "float16 on the way": hooked_in_half,
    "factors on the way": hooked_low_rank,
    "buckets of one tensor": small_buckets,
    "a group of its own": in_another_group,
}
"""Further kinds of DDP."""
