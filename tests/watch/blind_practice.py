"""Right loops with averages, plateaus, searches, climbs, clipping and freezing, written without sight of the judge.

As in `blind_kinds`: in one process each trains the same over the global batch, unless its docstring says why not.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.watch.blind_models import (
    HALVES,
    Block,
    Convolutions,
    Language,
    Opens,
    Standardised,
    batches,
    drawn,
    gradients,
    halves,
    local_batch,
    mean_over_ranks,
    mine,
    next_words,
    perceptron,
    pictures,
    summed,
    table,
    texts,
)


def average_on_rank_0(steps: int, watch: Opens) -> nn.Module:
    """Rank 0 keeps an exponential average and scores it every fifth update; the others are told the score."""
    torch.manual_seed(20)
    model = DDP(Convolutions(lambda width: nn.GroupNorm(4, width)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    x, y = pictures()
    average = None
    if dist.get_rank() == 0:
        average = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    w = watch(model, optimizer)
    for step in range(steps):
        rows = mine(drawn(step, 32))
        optimizer.zero_grad()
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
        if average is not None:
            average.update_parameters(model.module)
        if step % 5 == 4:
            score = torch.zeros(())
            if average is not None:
                average.eval()
                with torch.no_grad():
                    score = (average(x).argmax(1) == y).float().mean()
            dist.broadcast(score, src=0)
    w.close()
    return model


def averaged_from_half_way(steps: int, watch: Opens) -> nn.Module:
    """SWA on all ranks with a rate of its own; at the end each rank renews the average's batch norms over all rows."""
    torch.manual_seed(21)
    model = DDP(Convolutions(nn.BatchNorm2d))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = SWALR(optimizer, swa_lr=0.02, anneal_epochs=5)
    average = AveragedModel(model.module)
    x, y = pictures()
    w = watch(model, optimizer)
    for step in range(steps):
        optimizer.zero_grad()
        for half in halves():
            rows = drawn(step, 32)[half::HALVES]
            (F.cross_entropy(model(x[rows]), y[rows]) / len(halves())).backward()
        optimizer.step()
        if step >= steps // 2:
            average.update_parameters(model.module)
            scheduler.step()
    update_bn(DataLoader(TensorDataset(x), batch_size=8), average)
    w.close()
    return nn.ModuleList([model, average])


def best_weights_restored(steps: int, watch: Opens) -> nn.Module:
    """Every fourth update all ranks score held-out rows together; the rate goes down on a plateau.

    After two scores that are no better the best weights come back.
    """
    torch.manual_seed(22)
    model = DDP(perceptron(10, 24, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.8, patience=1, min_lr=1e-3)
    x, y = table(96)
    dataset = TensorDataset(x[:64], y[:64])
    loader = DataLoader(dataset, batch_size=local_batch(), sampler=DistributedSampler(dataset))
    best, best_state, worse = math.inf, copy.deepcopy(model.state_dict()), 0
    w = watch(model, optimizer)
    for step, (rows, labels) in enumerate(batches(loader, steps)):
        loss = F.cross_entropy(model(rows), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 4 < 3:
            continue
        model.eval()
        with torch.no_grad():
            held_out = mine(torch.arange(64, 96))
            total, number = summed(
                float(F.cross_entropy(model.module(x[held_out]), y[held_out], reduction="sum")), len(held_out)
            )
        model.train()
        scheduler.step(total / number)
        if total / number < best - 1e-3:
            best, best_state, worse = total / number, copy.deepcopy(model.state_dict()), 0
        elif (worse := worse + 1) == 2:
            model.load_state_dict(best_state)
            worse = 0
    w.close()
    return model


def rows_run_out(steps: int, watch: Opens) -> nn.Module:
    """Each rank has files of its own, of 17 and 6 rows: a rank whose rows have run out goes on with empty batches."""
    torch.manual_seed(23)
    model = DDP(perceptron(10, 24, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = table(23)
    files = [range(17), range(17, 23)]
    w = watch(model, optimizer)
    for step in range(steps):
        start = step % 5 * 4
        rows = [row for half in halves() for row in files[half][start : start + 4]]
        (number,) = summed(len(rows))
        loss = F.cross_entropy(model(x[rows]), y[rows], reduction="sum") * dist.get_world_size() / number
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    w.close()
    return model


def line_search(steps: int, watch: Opens) -> nn.Module:
    """LBFGS with a strong Wolfe search in float64; the closure reduces the gradients and the loss."""
    torch.manual_seed(24)
    model = nn.Linear(10, 4).double()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1, max_iter=4, history_size=5, line_search_fn="strong_wolfe")
    x, y = table(64)
    w = watch(model, optimizer)
    for step in range(steps):
        rows = mine(drawn(step, 64, size=32))

        def closure(rows: Tensor = rows) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x[rows].double()), y[rows])
            loss = loss + 0.01 * sum(p.square().sum() for p in model.parameters())
            loss.backward()
            reported = loss.detach()[None]
            mean_over_ranks([*gradients(model), reported])
            return reported[0]

        optimizer.step(closure)
    w.close()
    return model


class Sharpness(torch.optim.Optimizer):
    """SAM: the gradient is taken where the loss is highest nearby, and used from where the weights were."""

    def __init__(self, params: Any, base: type[torch.optim.Optimizer], rho: float, **options: Any) -> None:
        super().__init__(params, {"rho": rho, **options})
        self.base = base(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in held]).norm()
        for p in held:
            self.state[p]["old"] = p.clone()
            p.add_(p.grad, alpha=float(self.param_groups[0]["rho"] / (norm + 1e-12)))
        self.zero_grad()
        with torch.enable_grad():
            closure()
        for p in held:
            p.copy_(self.state[p]["old"])
        self.base.step()


def sharpness_of_each_rank(steps: int, watch: Opens) -> nn.Module:
    """SAM as its authors advise: each rank climbs by its own gradient (`no_sync`), the second gradient is reduced.

    In one process that is one climb for each half, so that has a loop of its own below.
    """
    torch.manual_seed(25)
    if dist.get_world_size() == 1:
        return _sharpness_alone(steps)
    model = DDP(perceptron(10, 24, 4))
    optimizer = Sharpness(model.parameters(), torch.optim.SGD, rho=0.05, lr=0.1, momentum=0.9)
    x, y = table(64)
    w = watch(model, optimizer)
    for step in range(steps):
        rows = mine(drawn(step, 64))
        with model.no_sync():
            F.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step(lambda rows=rows: F.cross_entropy(model(x[rows]), y[rows]).backward())
        optimizer.zero_grad()
    w.close()
    return model


def _sharpness_alone(steps: int) -> nn.Module:
    model = perceptron(10, 24, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = table(64)
    for step in range(steps):
        total = [torch.zeros_like(p) for p in model.parameters()]
        for half in range(HALVES):
            rows = drawn(step, 64)[half::HALVES]
            first = torch.autograd.grad(F.cross_entropy(model(x[rows]), y[rows]), list(model.parameters()))
            norm = math.sqrt(sum(float(g.square().sum()) for g in first))
            climbed = {n: p + 0.05 / norm * g for (n, p), g in zip(model.named_parameters(), first, strict=True)}
            loss = F.cross_entropy(functional_call(model, climbed, (x[rows],)), y[rows])
            for sum_, g in zip(total, torch.autograd.grad(loss, list(climbed.values())), strict=True):
                sum_ += g / HALVES
        for p, g in zip(model.parameters(), total, strict=True):
            p.grad = g
        optimizer.step()
    return model


def adaptively_clipped(steps: int, watch: Opens) -> nn.Module:
    """Standardised convolutions; a filter's gradient is held to a part of the filter's norm, after DDP reduced it."""
    torch.manual_seed(26)
    model = DDP(Convolutions(lambda width: nn.GroupNorm(4, width), Standardised))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    dataset = TensorDataset(*pictures())
    loader = DataLoader(dataset, batch_size=local_batch(), sampler=DistributedSampler(dataset, seed=4))
    w = watch(model, optimizer)
    for x, y in batches(loader, steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        for p in model.module.body.parameters():
            if p.dim() > 1:
                of_weight = p.detach().flatten(1).norm(dim=1).clamp(min=1e-3)
                of_gradient = p.grad.flatten(1).norm(dim=1).clamp(min=1e-6)
                p.grad.mul_((0.02 * of_weight / of_gradient).clamp(max=1).view(-1, 1, 1, 1))
        optimizer.step()
    w.close()
    return model


def bfloat16_with_idle_scaler(steps: int, watch: Opens) -> nn.Module:
    """bf16 autocast, a scaler that is made for fp16 and not enabled, checkpointed layers with dropout."""
    torch.manual_seed(27)
    model = DDP(Language(checkpointed=True, dropout=0.1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    x, _ = texts()
    w = watch(model, optimizer)
    for step in range(steps):
        rows = drawn(step, 40)
        optimizer.zero_grad()
        for half in halves():
            torch.manual_seed(100 * step + half)  # each rank has masks of its own
            words = x[rows[half::HALVES]]
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = next_words(model(words), words) * dist.get_world_size() / (x[rows, 1:] > 0).sum()
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    w.close()
    return model


def learned_to_learn(steps: int, watch: Opens) -> nn.Module:
    """MAML: an inner step on each task by `functional_call`; the outer gradients by `autograd.grad`, no backward."""
    torch.manual_seed(28)
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    waves = torch.rand(24, 2, generator=torch.Generator().manual_seed(1)) * 2 + 0.5
    points = torch.linspace(-3, 3, 12)[:, None]
    w = watch(model, optimizer)
    for step in range(steps):
        named = dict(model.named_parameters())
        losses = []
        for height, shift in waves[mine(drawn(step, 24, size=4))]:
            y = height * torch.sin(points + shift)
            inner = F.mse_loss(functional_call(model, named, (points[::2],)), y[::2])
            asked = torch.autograd.grad(inner, list(named.values()), create_graph=True)
            fast = {name: p - 0.1 * g for (name, p), g in zip(named.items(), asked, strict=True)}
            losses.append(F.mse_loss(functional_call(model, fast, (points[1::2],)), y[1::2]))
        found = torch.autograd.grad(torch.stack(losses).mean(), list(named.values()))
        for p, g in zip(named.values(), found, strict=True):
            p.grad = g
        mean_over_ranks(gradients(model))
        optimizer.step()
    w.close()
    return model


def thawed_from_the_top(steps: int, watch: Opens) -> nn.Module:
    """Gradual unfreezing: one optimizer has all layers, each with a rate of its own; the lower ones train later."""
    torch.manual_seed(29)
    model = nn.Sequential(nn.Embedding(30, 16), *(Block(16, nn.Linear, 0.0) for _ in range(2)), nn.Linear(16, 30))
    groups = [{"params": list(layer.parameters()), "lr": 3e-3 / 2.0**depth} for depth, layer in enumerate(model[::-1])]
    optimizer = torch.optim.AdamW(groups)
    x, _ = texts()
    model[:3].requires_grad_(False)
    w = watch(model, optimizer)
    for step in range(steps):
        if step and step % max(steps // 5, 1) == 0:
            model[max(3 - step // max(steps // 5, 1), 0) :].requires_grad_(True)
        rows = drawn(step, 40)
        loss = next_words(model(x[mine(rows)]), x[mine(rows)]) * dist.get_world_size() / (x[rows, 1:] > 0).sum()
        optimizer.zero_grad()
        loss.backward()
        mean_over_ranks(gradients(model))
        optimizer.step()
    w.close()
    return model


def group_added(steps: int, watch: Opens) -> nn.Module:
    """A head is trained first; half way the optimizer gets the body as a second group, with a lower rate."""
    torch.manual_seed(30)
    model = nn.ModuleDict({"body": perceptron(10, 24, 24), "head": nn.Linear(24, 4)})
    model["body"].requires_grad_(False)
    optimizer = torch.optim.Adam(model["head"].parameters(), lr=1e-2)
    x, y = table(64)
    w = watch(model, optimizer)
    for step in range(steps):
        if step == steps // 2:
            model["body"].requires_grad_(True)
            optimizer.add_param_group({"params": list(model["body"].parameters()), "lr": 1e-3})
        rows = mine(drawn(step, 64))
        loss = F.cross_entropy(model["head"](model["body"](x[rows])), y[rows])
        optimizer.zero_grad()
        loss.backward()
        mean_over_ranks(gradients(model))
        optimizer.step()
    w.close()
    return model


KINDS = {
    kind.__name__: kind
    for kind in (
        average_on_rank_0,
        averaged_from_half_way,
        best_weights_restored,
        rows_run_out,
        line_search,
        sharpness_of_each_rank,
        adaptively_clipped,
        bfloat16_with_idle_scaler,
        learned_to_learn,
        thawed_from_the_top,
        group_added,
    )
}
