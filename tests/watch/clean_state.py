"""Right loops in which more than one step of one optimizer happens: averages, several optimizers, a resumed run."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import andon
from tests.watch.clean import Seen, ignore, seen_by
from tests.watch.clean_loops import SKIPS_FROM, adamw, momentum
from tests.watch.clean_models import Normed
from tests.watch.loop import ROWS, Model, data, plan


def _share() -> tuple[Tensor, Tensor]:
    x, y = data()
    mine = torch.arange(dist.get_rank(), 32, dist.get_world_size())
    return x[mine], y[mine]


def _backward(model: nn.Module) -> None:
    x, y = _share()
    nn.functional.cross_entropy(model(x), y).backward()


def averaged(steps: int) -> Seen:
    """An average of the weights and buffers, which takes the place of the weights while it is evaluated."""
    torch.manual_seed(0)
    inner = Normed()
    model = DistributedDataParallel(inner)
    optimizer = adamw(list(inner.parameters()))
    w = andon.watch(model, optimizer, action=ignore)
    average = copy.deepcopy(inner)
    torch.manual_seed(100 + dist.get_rank())
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        _backward(model)
        optimizer.step()
        with torch.no_grad():
            for kept, now in zip(average.parameters(), inner.parameters(), strict=True):
                kept.lerp_(now, 0.1)
        if step % 5 == 0:
            _evaluate_in_place(model, average)
    w.close()
    return seen_by(w)


@torch.no_grad()
def _evaluate_in_place(model: DistributedDataParallel, average: nn.Module) -> None:
    own = copy.deepcopy(model.module.state_dict())
    model.module.load_state_dict(average.state_dict())
    model.eval()
    model.module(data()[0])
    model.train()
    model.module.load_state_dict(own)


def two_optimizers(steps: int) -> Seen:
    """One for the adapter and one for the head, each at every step."""
    torch.manual_seed(0)
    inner = Model()
    model = DistributedDataParallel(inner)
    adapter = [p for n, p in inner.named_parameters() if "lora" in n]
    both = [adamw(adapter), momentum(list(inner.head.parameters()))]
    w = andon.watch(model, both, action=ignore)
    for _ in range(steps):
        for optimizer in both:
            optimizer.zero_grad()
        _backward(model)
        for optimizer in both:
            optimizer.step()
    w.close()
    return seen_by(w)


class Adversaries(nn.Module):
    """A generator and a critic of what it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8))
        self.critic = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        made = self.generator(noise)
        return made, self.critic(made)


def alternating(steps: int) -> Seen:
    """Two optimizers in turn, the critic's twice as often; the generator's loss leaves gradients in the critic."""
    torch.manual_seed(0)
    model = Adversaries()
    makes, judges = (adamw(list(part.parameters())) for part in (model.generator, model.critic))
    w = andon.watch(model, [makes, judges], action=ignore)
    torch.manual_seed(100 + dist.get_rank())
    for step in range(1, steps + 1):
        made, critique = model(torch.randn(len(_share()[0]), 4))
        if step % 3 == 0:
            makes.zero_grad()
            nn.functional.softplus(-critique).mean().backward()
            _mean_and_step(model.generator, makes)
            continue
        judges.zero_grad()
        real = model.critic(_share()[0])
        (nn.functional.softplus(model.critic(made.detach())) + nn.functional.softplus(-real)).mean().backward()
        _mean_and_step(model.critic, judges)
    w.close()
    return seen_by(w)


def _mean_and_step(part: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for p in part.parameters():
        assert p.grad is not None
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    optimizer.step()


def resumed(steps: int) -> Seen:
    """Half of the steps, a checkpoint, another model and optimizer that load it, and the other half."""
    half = steps // 2
    path = path_of_all_ranks()
    torch.manual_seed(0)
    first = Model()
    adam = adamw([p for p in first.parameters() if p.requires_grad])
    with andon.watch(DistributedDataParallel(first), adam, action=ignore) as one:
        _train(DistributedDataParallel(first), adam, half)
        one.saved(path)
    weights, moments, random = copy.deepcopy((first.state_dict(), adam.state_dict(), torch.get_rng_state()))
    torch.manual_seed(1)
    second = Model()
    adam = adamw([p for p in second.parameters() if p.requires_grad])
    second.load_state_dict(weights)
    adam.load_state_dict(moments)
    torch.set_rng_state(random)
    model = DistributedDataParallel(second)
    with andon.watch(model, adam, action=ignore, start=half) as two:
        two.loaded(path)
        _train(model, adam, steps - half)
    return seen_by(one, two)


def audited(steps: int) -> Seen:
    """Every tenth gradient is computed again, with the masks and batch statistics that the ranks had."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Normed())
    optimizer = momentum(list(model.parameters()))
    w = andon.watch(model, optimizer, action=ignore, reference=_loss_sum, every=10)
    torch.manual_seed(100 + dist.get_rank())
    x, y = data()
    for step in range(steps):
        optimizer.zero_grad()
        ids = (torch.arange(9 + step % 2) + 7 * step) % len(x)
        mine = ids[dist.get_rank() :: dist.get_world_size()]
        w.batch(mine)
        share = nn.functional.cross_entropy(model(x[mine]), y[mine], reduction="sum") / len(ids)
        (share * dist.get_world_size()).backward()
        optimizer.step()
    w.close()
    return seen_by(w)


def scaled_and_told(steps: int) -> Seen:
    """Updates that a scaler leaves out use up the rows that were planned for them."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Model())
    optimizer = adamw([p for p in model.parameters() if p.requires_grad])
    scaler = torch.amp.GradScaler("cpu", init_scale=SKIPS_FROM, growth_interval=4)
    w = andon.watch(model, optimizer, action=ignore, scaler=scaler, plan=plan, rows=ROWS)
    x, y = data()
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        ids = plan(step)
        mine = torch.tensor(ids[dist.get_rank() :: dist.get_world_size()])
        w.batch(mine)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(x[mine]), y[mine], reduction="sum")
        # DDP takes the mean over ranks of what each adds to the mean over rows.
        scaler.scale(loss * dist.get_world_size() / len(ids)).backward()  # type: ignore[no-untyped-call]
        w.loss(loss.detach(), len(mine), float(_mean(loss.detach(), len(ids))))
        scaler.step(optimizer)
        scaler.update()
    w.close()
    return seen_by(w)


def _mean(loss: Tensor, rows: int) -> Tensor:
    total = loss.double()
    dist.all_reduce(total)
    return total / rows


def _loss_sum(model: nn.Module, ids: Sequence[int]) -> tuple[Tensor, int]:
    x, y = data()
    index = torch.tensor(list(ids))
    return nn.functional.cross_entropy(model(x[index]), y[index], reduction="sum"), len(ids)


def path_of_all_ranks() -> Path:
    name = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(name, 0)
    return Path(str(name[0])) / "checkpoint.pt"


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        _backward(model)
        optimizer.step()
