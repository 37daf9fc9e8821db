"""Right loops that reduce, average, score, prune or restore in ways of their own, written without sight of the judge.

As in `blind_kinds`: in one process each trains the same over the global batch, unless its docstring says why not.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import prune
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, DistributedSampler, Sampler, TensorDataset

from tests.watch.blind_models import (
    HALVES,
    Convolutions,
    Language,
    Opens,
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


def rolled_back(steps: int, watch: Opens) -> nn.Module:
    """Rank 0 saves every fifth update; at the twelfth all ranks go back to what was saved last, and skip the batch."""
    torch.manual_seed(31)
    model = DDP(perceptron(10, 24, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    scheduler = StepLR(optimizer, step_size=8, gamma=0.7)
    shared = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(shared, src=0)
    path = Path(shared[0]) / "last.pt"
    dataset = TensorDataset(*table(64))
    loader = DataLoader(dataset, batch_size=local_batch(), sampler=DistributedSampler(dataset, seed=5))
    w = watch(model, optimizer)
    for step, (x, y) in enumerate(batches(loader, steps)):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        if step == 12:
            saved = torch.load(path, weights_only=True)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            scheduler.load_state_dict(saved["scheduler"])
            continue
        optimizer.step()
        scheduler.step()
        if step % 5 == 4:
            if dist.get_rank() == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**state, "scheduler": scheduler.state_dict()}, path)
            dist.barrier()
    w.close()
    return model


def adam_then_sgd(steps: int, watch: Opens) -> nn.Module:
    """Half way another optimizer takes over, which gets a watch of its own."""
    torch.manual_seed(32)
    model = DDP(Convolutions(lambda width: nn.GroupNorm(4, width)))
    optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    x, y = pictures()
    w = watch(model, optimizer)
    for step in range(steps):
        if step == steps // 2:
            w.close()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            w = watch(model, optimizer)
        rows = mine(drawn(step, 32))
        optimizer.zero_grad()
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    w.close()
    return model


def compressed_with_residual(steps: int, watch: Opens) -> nn.Module:
    """Gradients go over the wire in bfloat16; what was rounded off stays on its rank for the next update."""
    torch.manual_seed(33)
    model = perceptron(10, 24, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    residuals = {half: [torch.zeros_like(p) for p in model.parameters()] for half in halves()}
    x, y = table(64)
    w = watch(model, optimizer)
    for step in range(steps):
        totals = [torch.zeros_like(p, dtype=torch.bfloat16) for p in model.parameters()]
        for half in halves():
            rows = drawn(step, 64)[half::HALVES]
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            for total, residual, g in zip(totals, residuals[half], gradients(model), strict=True):
                residual += g
                total += residual.bfloat16()
                residual -= residual.bfloat16().float()
        for p, total in zip(model.parameters(), totals, strict=True):
            dist.all_reduce(total)
            p.grad = total.float() / HALVES
        optimizer.step()
    w.close()
    return model


def scattered_then_gathered(steps: int, watch: Opens) -> nn.Module:
    """Each rank sums one slice of the flat gradient (`reduce_scatter`), divides it and gives it to all."""
    torch.manual_seed(34)
    model = Language()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    x, _ = texts()
    world = dist.get_world_size()
    w = watch(model, optimizer)
    for step in range(steps):
        rows = drawn(step, 40)
        optimizer.zero_grad()
        (next_words(model(x[mine(rows)]), x[mine(rows)]) / (x[rows, 1:] > 0).sum()).backward()
        flat = torch.cat([g.flatten() for g in gradients(model)])
        length = len(flat)
        flat = F.pad(flat, (0, -length % world))
        part = torch.empty(len(flat) // world)
        dist.reduce_scatter_tensor(part, flat)
        dist.all_gather_into_tensor(flat, part)
        start = 0
        for p in model.parameters():
            p.grad = flat[start : start + p.numel()].view_as(p)
            start += p.numel()
        optimizer.step()
    w.close()
    return model


def _averaged(models: list[nn.Module]) -> None:
    with torch.no_grad():
        for same in zip(*(each.parameters() for each in models), strict=True):
            mean = sum(same) / len(same)
            for p in same:
                p.copy_(mean)


def gossip(steps: int, watch: Opens) -> nn.Module:
    """Each rank trains by itself and then meets its neighbour half way, every update.

    The momentum is each rank's own, so one process holds both ranks' models.
    """
    models, optimizers = [], []
    for _ in halves():
        torch.manual_seed(35)
        models.append(perceptron(10, 24, 4))
        optimizers.append(torch.optim.SGD(models[-1].parameters(), lr=0.05, momentum=0.9))
    x, y = table(64)
    w = watch(models[0], optimizers[0])
    for step in range(steps):
        for half, model, optimizer in zip(halves(), models, optimizers, strict=True):
            rows = drawn(step, 64)[half::HALVES]
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
        if dist.get_world_size() == 1:
            _averaged(models)
            continue
        peer = 1 - dist.get_rank()
        with torch.no_grad():
            for p in models[0].parameters():
                theirs = torch.empty_like(p)
                for request in dist.batch_isend_irecv(
                    [dist.P2POp(dist.isend, p.detach(), peer), dist.P2POp(dist.irecv, theirs, peer)]
                ):
                    request.wait()
                p.add_(theirs).div_(2)
    w.close()
    return models[0]


def outer_optimizer(steps: int, watch: Opens) -> nn.Module:
    """DiLoCo: five updates of AdamW on each rank alone, then one of Nesterov SGD on the mean of the ways they went.

    The moments are each rank's own, so one process holds both ranks' models.
    """
    models, optimizers = [], []
    for _ in halves():
        torch.manual_seed(36)
        models.append(Language())
        optimizers.append(torch.optim.AdamW(models[-1].parameters(), lr=2e-3))
    anchor = [nn.Parameter(p.detach().clone()) for p in models[0].parameters()]
    outer = torch.optim.SGD(anchor, lr=0.7, momentum=0.9, nesterov=True)
    x, _ = texts()
    w = watch(models[0], optimizers[0])
    for step in range(steps):
        for half, model, optimizer in zip(halves(), models, optimizers, strict=True):
            words = x[drawn(step, 40)[half::HALVES]]
            optimizer.zero_grad()
            (next_words(model(words), words) / (words[:, 1:] > 0).sum()).backward()
            optimizer.step()
        if step % 5 < 4:
            continue
        ways = [
            sum(a.detach() - p.detach() for p in same) / len(models)
            for a, *same in zip(anchor, *(each.parameters() for each in models), strict=True)
        ]
        mean_over_ranks(ways)
        for a, way in zip(anchor, ways, strict=True):
            a.grad = way
        outer.step()
        with torch.no_grad():
            for model in models:
                for p, a in zip(model.parameters(), anchor, strict=True):
                    p.copy_(a)
    w.close()
    return models[0]


class Weighted(Sampler[int]):
    """Rows drawn by weight, with replacement: all ranks draw the same and each takes its part."""

    def __init__(self, weights: Tensor) -> None:
        self.weights, self.epoch = weights, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(100 + self.epoch)
        return iter(mine(torch.multinomial(self.weights, len(self.weights), True, generator=generator)).tolist())

    def __len__(self) -> int:
        return len(self.weights) // dist.get_world_size()


def rare_rows_more_often(steps: int, watch: Opens) -> nn.Module:
    """Rows of rare classes are drawn more often; the counts of hits are kept on each rank and summed every pass."""
    torch.manual_seed(37)
    model = DDP(perceptron(10, 24, 4))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    x, y = table(64)
    weights = 1 / y.bincount(minlength=4)[y].float()
    loader = DataLoader(TensorDataset(x, y), batch_size=local_batch(), sampler=Weighted(weights))
    hits = seen = 0
    w = watch(model, optimizer)
    for step, (rows, labels) in enumerate(batches(loader, steps)):
        logits = model(rows)
        optimizer.zero_grad()
        F.cross_entropy(logits, labels).backward()
        optimizer.step()
        hits += int((logits.argmax(1) == labels).sum())
        seen += len(labels)
        if step % 8 == 7:
            summed(hits, seen)
            hits = seen = 0
    w.close()
    return model


def policy_gradient(steps: int, watch: Opens) -> nn.Module:
    """PPO: each rank plays games of its own; advantages are scaled by all ranks' spread; four updates a rollout.

    A rollout ends early where the policy has moved too far, as all ranks measure it together.
    """
    torch.manual_seed(38)
    model = DDP(perceptron(4, 16, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-5)
    w = watch(model, optimizer)
    done = rollout = 0
    while done < steps:
        rollout += 1
        played = []
        for half in halves():
            dice = torch.Generator().manual_seed(10 * rollout + half)
            states = torch.randn(16, 4, generator=dice)
            with torch.no_grad():
                chances = model.module(states).log_softmax(1)
            actions = torch.multinomial(chances.exp(), 1, generator=dice)
            rewards = (actions.squeeze(1) == states[:, :3].argmax(1)).float() + 0.1 * states[:, 3]
            played.append((states, actions, chances.gather(1, actions).squeeze(1), rewards))
        states, actions, before, rewards = (torch.cat(each) for each in zip(*played, strict=True))
        total, squares, number = summed(float(rewards.sum()), float(rewards.square().sum()), len(rewards))
        mean = total / number
        advantages = (rewards - mean) / ((squares / number - mean**2) ** 0.5 + 1e-8)
        for turn in range(4):
            part = torch.arange(turn % 2, len(states), 2)
            now = model(states[part]).log_softmax(1).gather(1, actions[part]).squeeze(1)
            ratio = (now - before[part]).exp()
            gain = torch.minimum(ratio * advantages[part], ratio.clamp(0.8, 1.2) * advantages[part])
            optimizer.zero_grad()
            (-gain.mean()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            done += 1
            moved, count = summed(float((before[part] - now.detach()).sum()), len(part))
            if moved / count > 0.05 or done == steps:
                break
    w.close()
    return model


class Quantised(nn.Module):
    """An autoencoder through a codebook, which follows the rows of all ranks by an exponential average."""

    codes: Tensor
    sizes: Tensor
    sums: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = perceptron(10, 16, 4), perceptron(4, 16, 10)
        codes = torch.randn(12, 4) / 2
        self.register_buffer("codes", codes)
        self.register_buffer("sizes", torch.ones(12))
        self.register_buffer("sums", codes.clone())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.encoder(x)
        nearest = torch.cdist(z, self.codes).argmin(1)
        code = self.codes[nearest]
        if self.training:
            with torch.no_grad():
                asked = F.one_hot(nearest, 12).float()
                both = torch.cat([asked.sum(0)[:, None], asked.T @ z], dim=1)
                dist.all_reduce(both)
                self.sizes.mul_(0.9).add_(both[:, 0], alpha=0.1)
                self.sums.mul_(0.9).add_(both[:, 1:], alpha=0.1)
                self.codes.copy_(self.sums / self.sizes[:, None].clamp(min=1e-3))
        return self.decoder(z + (code - z).detach()), F.mse_loss(z, code.detach())


def codebook_of_all_ranks(steps: int, watch: Opens) -> nn.Module:
    """A codebook in buffers that the forward pass moves by the sums over all ranks."""
    torch.manual_seed(39)
    model = DDP(Quantised())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    dataset = TensorDataset(table(64)[0])
    loader = DataLoader(dataset, batch_size=local_batch(), sampler=DistributedSampler(dataset, seed=6))
    w = watch(model, optimizer)
    for (x,) in batches(loader, steps):
        again, far = model(x)
        loss = F.mse_loss(again, x) + 0.25 * far
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    w.close()
    return model


def update_inside_backward(steps: int, watch: Opens) -> nn.Module:
    """An optimizer for each parameter, which reduces and steps as soon as that gradient is there, and drops it."""
    torch.manual_seed(40)
    model = perceptron(10, 24, 4)
    optimizers = {p: torch.optim.AdamW([p], lr=3e-3) for p in model.parameters()}

    def step_now(p: Tensor) -> None:
        assert p.grad is not None
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step_now)
    x, y = table(64)
    w = watch(model, list(optimizers.values()))
    for step in range(steps):
        rows = mine(drawn(step, 64))
        F.cross_entropy(model(x[rows]), y[rows]).backward()
    w.close()
    return model


def pruned_on_the_way(steps: int, watch: Opens) -> nn.Module:
    """Twice the smallest weights of each layer are masked by torch's `prune`, and training goes on."""
    torch.manual_seed(41)
    model = perceptron(10, 24, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    x, y = table(64)
    w = watch(model, optimizer)
    for step in range(steps):
        if step in (steps // 3, 2 * steps // 3):
            for layer in model:
                if isinstance(layer, nn.Linear):
                    prune.l1_unstructured(layer, "weight", amount=0.3)
        rows = mine(drawn(step, 64))
        optimizer.zero_grad()
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        for g in gradients(model):
            dist.all_reduce(g)
            g /= dist.get_world_size()
        optimizer.step()
    w.close()
    return model


def average_put_in_to_evaluate(steps: int, watch: Opens) -> nn.Module:
    """Every fifth update the weights are put aside, the average takes their place to be scored, and they come back."""
    torch.manual_seed(42)
    model = DDP(perceptron(10, 24, 24, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    shadow = [p.detach().clone() for p in model.parameters()]
    x, y = table(96)
    dataset = TensorDataset(x[:64], y[:64])
    loader = DataLoader(dataset, batch_size=local_batch(), sampler=DistributedSampler(dataset, seed=7))
    w = watch(model, optimizer)
    for step, (rows, labels) in enumerate(batches(loader, steps)):
        optimizer.zero_grad()
        F.cross_entropy(model(rows), labels).backward()
        optimizer.step()
        with torch.no_grad():
            for s, p in zip(shadow, model.parameters(), strict=True):
                s.lerp_(p, 0.1)
        if step % 5 < 4:
            continue
        aside = [p.detach().clone() for p in model.parameters()]
        model.eval()
        with torch.no_grad():
            for p, s in zip(model.parameters(), shadow, strict=True):
                p.copy_(s)
            held_out = mine(torch.arange(64, 96))
            summed(float((model.module(x[held_out]).argmax(1) == y[held_out]).sum()))
            for p, kept in zip(model.parameters(), aside, strict=True):
                p.copy_(kept)
        model.train()
    w.close()
    return model


KINDS = {
    kind.__name__: kind
    for kind in (
        rolled_back,
        adam_then_sgd,
        compressed_with_residual,
        scattered_then_gathered,
        gossip,
        outer_optimizer,
        rare_rows_more_often,
        policy_gradient,
        codebook_of_all_ranks,
        update_inside_backward,
        pruned_on_the_way,
        average_put_in_to_evaluate,
    )
}
