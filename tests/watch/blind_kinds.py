"""Right loops of models of many forms, written without sight of the code that judges them.

Each trains `steps` updates on any number of ranks and gives back what it trained. In one process it trains the same
over the global batch; where its docstring does not say otherwise, to the rounding of sums in another order.
"""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.watch.blind_models import (
    BATCH,
    HALVES,
    Convolutions,
    Language,
    Opens,
    batches,
    drawn,
    gradients,
    halves,
    local_batch,
    mine,
    next_words,
    perceptron,
    pictures,
    summed,
    table,
    texts,
)


def pictures_grow(steps: int, watch: Opens) -> nn.Module:
    """Convolutions with batch norm under DDP; pictures are small at first (progressive resizing); one-cycle rate."""
    torch.manual_seed(11)
    model = DDP(Convolutions(nn.BatchNorm2d))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True, weight_decay=1e-4)
    scheduler = OneCycleLR(optimizer, max_lr=0.1, total_steps=steps + 1)
    x, y = pictures()
    w = watch(model, optimizer)
    for step in range(steps):
        size = 8 if step < steps // 2 else 12
        optimizer.zero_grad()
        for half in halves():
            rows = drawn(step, 32)[half::HALVES]
            small = F.interpolate(x[rows], size=(size, size), mode="bilinear")
            (F.cross_entropy(model(small), y[rows], label_smoothing=0.1) / len(halves())).backward()
        optimizer.step()
        scheduler.step()
    w.close()
    return model


class Tagger(nn.Module):
    """A bidirectional LSTM over the words that are there, with a label for each."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(30, 8, padding_idx=0)
        self.lstm = nn.LSTM(8, 6, batch_first=True, bidirectional=True)
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(self.words(x), lengths, batch_first=True, enforce_sorted=False)
        hidden, _ = nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        return self.head(hidden)


def tagger_of_mixed_lengths(steps: int, watch: Opens) -> nn.Module:
    """LSTM on packed rows, loss summed, gradients summed in one message and divided by all ranks' words, clipped."""
    torch.manual_seed(12)
    model = Tagger()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    x, lengths = texts()
    w = watch(model, optimizer)
    for step in range(steps):
        rows = mine(drawn(step, 40))
        longest = int(lengths[rows].max())
        words = x[rows, :longest]
        loss = F.cross_entropy(
            model(words, lengths[rows]).flatten(0, 1),
            (words % 3).masked_fill(words == 0, -100).flatten(),
            reduction="sum",
        )
        optimizer.zero_grad()
        loss.backward()
        sums = torch.cat([g.flatten() for g in gradients(model)] + [(words > 0).sum().float()[None]])
        dist.all_reduce(sums)
        nn.utils.vector_to_parameters(sums[:-1] / sums[-1], gradients(model))
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    w.close()
    return model


def decoder_with_ragged_windows(steps: int, watch: Opens) -> nn.Module:
    """Tied weights, decay on matrices only, cosine rate, windows of two batches read ahead; the last one has one.

    The loss is divided by the words of the window on all ranks. The watch is told the rows and the clip's limit.
    """
    torch.manual_seed(13)
    model = DDP(Language())
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": others, "weight_decay": 0.0}], lr=2e-3)
    scheduler = LambdaLR(optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / (steps + 1))))
    dataset = TensorDataset(torch.arange(40), texts()[0])
    sampler = DistributedSampler(dataset, seed=3)
    loader = DataLoader(dataset, batch_size=local_batch(), sampler=sampler)
    w = watch(model, optimizer, rows=40, clip=1.0)
    done = epoch = 0
    while done < steps:
        sampler.set_epoch(epoch)
        epoch += 1
        reading = iter(loader)
        while done < steps and (window := list(islice(reading, 2))):
            (words,) = summed(sum(int((x[:, 1:] > 0).sum()) for _, x in window))
            for index, (ids, x) in enumerate(window):
                w.batch(ids)
                with nullcontext() if index == len(window) - 1 else model.no_sync():
                    (next_words(model(x), x) * dist.get_world_size() / words).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            done += 1
    w.close()
    return model


class Bag(nn.Module):
    """The mean of a row's embeddings, whose gradient is sparse, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(30, 8, sparse=True, mode="mean", padding_idx=0)
        self.head = perceptron(8, 12, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.bag(x))


def bag_with_sparse_adam(steps: int, watch: Opens) -> nn.Module:
    """Sparse gradients reduced by DDP; SparseAdam for the embedding, AdamW for the rest."""
    torch.manual_seed(14)
    model = DDP(Bag())
    sparse = torch.optim.SparseAdam([model.module.bag.weight], lr=5e-3)
    dense = torch.optim.AdamW(model.module.head.parameters(), lr=5e-3)
    x, lengths = texts()
    w = watch(model, [sparse, dense])
    for step in range(steps):
        rows = mine(drawn(step, 40))
        loss = F.cross_entropy(model(x[rows]), lengths[rows] % 4)
        sparse.zero_grad()
        dense.zero_grad()
        loss.backward()
        sparse.step()
        dense.step()
    w.close()
    return model


class LowRank(nn.Linear):
    """A frozen linear layer and two trained factors beside it, which may be merged into it for a while."""

    def __init__(self, before: int, after: int, bias: bool) -> None:
        super().__init__(before, after, bias=bias)
        self.weight.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, before) / before**0.5)
        self.b = nn.Parameter(torch.zeros(after, 2))
        self.kept: Tensor | None = None

    @torch.no_grad()
    def merge(self) -> None:
        self.kept = self.weight.clone()
        self.weight += 2.0 * self.b @ self.a

    @torch.no_grad()
    def unmerge(self) -> None:
        assert self.kept is not None
        self.weight.copy_(self.kept)
        self.kept = None

    def forward(self, x: Tensor) -> Tensor:
        plain = F.linear(x, self.weight)
        return plain if self.kept is not None else plain + 2.0 * (x @ self.a.T @ self.b.T)


def factors_merged_to_evaluate(steps: int, watch: Opens) -> nn.Module:
    """LoRA by hand under DDP; every fifth update the factors are merged, all rows are scored, and they are unmerged."""
    torch.manual_seed(15)
    inner = Language(linear=LowRank).requires_grad_(False)
    layers = [module for module in inner.modules() if isinstance(module, LowRank)]
    for layer in layers:
        layer.a.requires_grad_()
        layer.b.requires_grad_()
    model = DDP(inner)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=5e-3)
    x, _ = texts()
    w = watch(model, optimizer)
    for step in range(steps):
        rows = drawn(step, 40)
        loss = next_words(model(x[mine(rows)]), x[mine(rows)]) * dist.get_world_size() / (x[rows, 1:] > 0).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 4:
            model.eval()
            for layer in layers:
                layer.merge()
            with torch.no_grad():
                held_out = mine(torch.arange(40))
                summed(float(next_words(inner(x[held_out]), x[held_out])))
            for layer in layers:
                layer.unmerge()
            model.train()
    w.close()
    return model


class Experts(nn.Module):
    """Six experts, of which each row asks one, and a residual path."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.router, self.head = nn.Linear(10, 16), nn.Linear(16, 6), nn.Linear(16, 4)
        self.experts = nn.ModuleList(perceptron(16, 8, 16) for _ in range(6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(x).relu()
        asked = self.router(x)
        weight, chosen = asked.softmax(1).max(1)
        out = x.clone()
        for index, expert in enumerate(self.experts):
            where = (chosen == index).nonzero().squeeze(1)
            if len(where):
                out = out.index_add(0, where, expert(x[where]) * weight[where, None])
        return self.head(out), asked


def experts_left_unused(steps: int, watch: Opens) -> nn.Module:
    """Mixture of experts, one expert for each row, so that some have none; the router's logits are kept small."""
    torch.manual_seed(16)
    model = DDP(Experts(), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    x, y = table(64)
    dataset = TensorDataset(x, y)
    sampler = DistributedSampler(dataset)
    w = watch(model, optimizer)
    for x, y in batches(DataLoader(dataset, batch_size=local_batch(), sampler=sampler), steps):
        logits, asked = model(x)
        loss = F.cross_entropy(logits, y) + 1e-2 * asked.logsumexp(1).square().mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    w.close()
    return model


def wasserstein_pair(steps: int, watch: Opens) -> nn.Module:
    """Generator and critic, each in a DDP with an optimizer and a watch; the critic's weights are clamped.

    The critic has two updates for one of the generator, in which it is frozen and called without its wrapper.
    """
    torch.manual_seed(17)
    generator, critic = DDP(perceptron(4, 16, 10)), DDP(perceptron(10, 16, 1))
    of_generator = torch.optim.RMSprop(generator.parameters(), lr=1e-3)
    of_critic = torch.optim.RMSprop(critic.parameters(), lr=1e-3)
    x, _ = table(64)
    noise = torch.Generator().manual_seed(1)
    watches = [watch(generator, of_generator), watch(critic, of_critic)]
    for step in range(steps):
        for turn in range(2):
            with torch.no_grad():
                made = generator(mine(torch.randn(BATCH, 4, generator=noise)))
            loss = critic(torch.cat([made, x[mine(drawn(2 * step + turn, 64))]]))
            of_critic.zero_grad()
            (loss[: len(made)].mean() - loss[len(made) :].mean()).backward()
            of_critic.step()
            with torch.no_grad():
                for p in critic.parameters():
                    p.clamp_(-0.2, 0.2)
        critic.requires_grad_(False)
        of_generator.zero_grad()
        (-critic.module(generator(mine(torch.randn(BATCH, 4, generator=noise)))).mean()).backward()
        of_generator.step()
        critic.requires_grad_(True)
    for w in watches:
        w.close()
    return nn.ModuleList([generator, critic])


class Gathered(torch.autograd.Function):
    """All ranks' rows; backward gives each rank the sum of what all ranks' losses ask of its rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size())[dist.get_rank()]


class Pairs(nn.Module):
    """Two encoders and a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.pictures, self.texts = Convolutions(lambda width: nn.GroupNorm(2, width)), Bag()
        self.texts.bag.sparse = False
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, x: Tensor, words: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return F.normalize(self.pictures(x)), F.normalize(self.texts(words)), self.logit_scale.exp()


def pairs_gathered(steps: int, watch: Opens) -> nn.Module:
    """Contrastive pairs over the features of all ranks, gathered with their gradients; the temperature is clamped."""
    torch.manual_seed(18)
    model = DDP(Pairs())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98))
    x, _ = pictures()
    words, _ = texts(32)
    w = watch(model, optimizer)
    for step in range(steps):
        rows = mine(drawn(step, 32))
        one, other, scale = model(x[rows], words[rows])
        products = scale * Gathered.apply(one) @ Gathered.apply(other).T
        target = torch.arange(len(products))
        loss = (F.cross_entropy(products, target) + F.cross_entropy(products.T, target)) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            model.module.logit_scale.clamp_(0, math.log(20))
    w.close()
    return model


def born_again(steps: int, watch: Opens) -> nn.Module:
    """A frozen teacher in evaluation mode; every tenth update the student takes its place."""
    torch.manual_seed(19)
    model = DDP(perceptron(10, 24, 24, 4))
    teacher = copy.deepcopy(model.module).eval().requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    dataset = TensorDataset(*table(64))
    loader = DataLoader(dataset, batch_size=local_batch(), sampler=DistributedSampler(dataset, seed=2))
    w = watch(model, optimizer)
    for step, (x, y) in enumerate(batches(loader, steps)):
        logits = model(x)
        with torch.no_grad():
            soft = (teacher(x) / 2).softmax(1)
        loss = F.cross_entropy(logits, y) + 4 * F.kl_div((logits / 2).log_softmax(1), soft, reduction="batchmean")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 9:
            teacher.load_state_dict(model.module.state_dict())
    w.close()
    return model


KINDS = {
    kind.__name__: kind
    for kind in (
        pictures_grow,
        tagger_of_mixed_lengths,
        decoder_with_ragged_windows,
        bag_with_sparse_adam,
        factors_merged_to_evaluate,
        experts_left_unused,
        wasserstein_pair,
        pairs_gathered,
        born_again,
    )
}
