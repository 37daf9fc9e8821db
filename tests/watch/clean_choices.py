"""Right loops of which a loss, a gradient or an average is a matter of choice, and that once were suspected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import andon
from tests.watch.clean import Seen, ignore, seen_by
from tests.watch.clean_models import LayerNormed
from tests.watch.loop import CLASSES, data


def half_square(logits: Tensor, labels: Tensor) -> Tensor:
    return ((logits - nn.functional.one_hot(labels, CLASSES)) ** 2).mean() / 2


def clip_each(model: nn.Module) -> None:
    for p in model.parameters():
        assert p.grad is not None
        p.grad.mul_(min(1.0, 0.01 / (float(p.grad.norm()) + 1e-6)))


class OneLate:
    """The gradient of the update before is the one that is applied."""

    def __init__(self) -> None:
        self.held: list[Tensor] = []

    def __call__(self, model: nn.Module) -> None:
        now = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        for p, gradient in zip(model.parameters(), self.held or now, strict=True):
            p.grad = gradient.clone()
        self.held = now


class OwnBeginning:
    """An average that each rank begins with numbers of its own, and whose first decay is 0, as that of diffusers is."""

    def __init__(self) -> None:
        self.held: list[Tensor] = []
        self.calls = 0

    def __call__(self, model: nn.Module) -> None:
        if not self.held:
            generator = torch.Generator().manual_seed(dist.get_rank())
            self.held = [torch.randn(p.shape, generator=generator) for p in model.parameters()]
        decay, self.calls = min(0.99, 1 - (1 + self.calls) ** -0.75), self.calls + 1
        with torch.no_grad():
            for kept, p in zip(self.held, model.parameters(), strict=True):
                kept.sub_((1 - decay) * (kept - p))


def _nothing(_: nn.Module) -> None:
    pass


@dataclass(frozen=True)
class Chosen:
    """A loop with a loss of its own. change: between backward pass and update. follow: behind each update."""

    loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.cross_entropy
    change: Callable[[], Callable[[nn.Module], None]] = lambda: _nothing
    follow: Callable[[], Callable[[nn.Module], None]] = lambda: _nothing

    def __call__(self, steps: int) -> Seen:
        torch.manual_seed(0)
        model = DistributedDataParallel(LayerNormed())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        change, follow = self.change(), self.follow()
        w = andon.watch(model, optimizer, action=ignore)
        x, y = data()
        for step in range(steps):
            rows = (torch.arange(4) * dist.get_world_size() + dist.get_rank() + step) % len(x)
            optimizer.zero_grad()
            self.loss(model(x[rows]), y[rows]).backward()  # type: ignore[no-untyped-call]
            change(model.module)
            optimizer.step()
            follow(model.module)
        w.close()
        return seen_by(w)


CHOICES: dict[str, Callable[[int], Seen]] = {
    "half the mean square": Chosen(loss=half_square),
    "each parameter clipped by hand": Chosen(change=lambda: clip_each),
    "gradients applied one update late": Chosen(change=OneLate),
    "average begun from each rank's own numbers": Chosen(follow=OwnBeginning),
}
