"""Correct training loops of many forms, whose author had not read the code of the watch.

A loop trains `steps` updates on any number of ranks and returns the trained model. One process trains on the whole
global batch and gets the same weights up to rounding, unless the loop's docstring says otherwise.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from itertools import count, islice, pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import prune
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import andon
from tests.watch.clean import Kind, Seen, ignore, path_of_all_ranks, seen_by
from tests.watch.clean_models import Apply

BATCH = 8
HALVES = 2


Opens = Callable[..., Any]
"""`andon.watch`, or what stands for it: of a model, an optimizer, and what is told once."""


class Unwatched:
    """A watch that sees nothing: a loop is proved right without any."""

    def __init__(self, model: nn.Module, optimizer: Any, **lines: Any) -> None:
        pass

    def batch(self, ids: Any) -> None:
        pass

    def close(self) -> None:
        pass


def halves() -> range:
    """The halves of a global batch that are this process's: one on each of two ranks, both in one process alone.

    What depends on which rows are seen together is then the same function of the rows in one process.
    """
    each = HALVES // dist.get_world_size()
    return range(dist.get_rank() * each, (dist.get_rank() + 1) * each)


def mine(rows: Tensor) -> Tensor:
    return rows[dist.get_rank() :: dist.get_world_size()]


def local_batch() -> int:
    return BATCH // dist.get_world_size()


def drawn(step: int, rows: int, size: int = BATCH) -> Tensor:
    """The rows of the global batch of a step: passes over all rows, each in an order of its own."""
    a_pass = rows // size
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(step // a_pass))
    return order[step % a_pass * size :][:size]


def dealt(*tensors: Tensor, seed: int = 0) -> DataLoader[Any]:
    dataset = TensorDataset(*tensors)
    return DataLoader(dataset, batch_size=local_batch(), sampler=DistributedSampler(dataset, seed=seed))


def batches(loader: DataLoader[Any]) -> Iterator[Any]:
    for epoch in count():
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        yield from loader


def mean_over_ranks(tensors: list[Tensor]) -> None:
    """Each tensor becomes its mean over all ranks, through one flat message."""
    flat = torch.cat([each.reshape(-1) for each in tensors])
    dist.all_reduce(flat)
    nn.utils.vector_to_parameters(flat / dist.get_world_size(), tensors)


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def summed(*values: float) -> list[float]:
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return total.tolist()


def table(rows: int, features: int = 10, classes: int = 4) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(5)
    x = torch.randn(rows, features, generator=made)
    return x, (x @ torch.randn(features, classes, generator=made)).argmax(1)


def pictures(rows: int = 32, classes: int = 4) -> tuple[Tensor, Tensor]:
    """Pictures of 3 x 12 x 12 with a bright quarter, which is their label."""
    made = torch.Generator().manual_seed(6)
    x = torch.randn(rows, 3, 12, 12, generator=made)
    y = torch.randint(classes, (rows,), generator=made)
    for row, label in enumerate(y.tolist()):
        top, left = 6 * (label // 2), 6 * (label % 2)
        x[row, :, top : top + 6, left : left + 6] += 1
    return x, y


def texts(rows: int = 40, longest: int = 9, words: int = 30) -> tuple[Tensor, Tensor]:
    """Rows of words, of 3 to `longest` of them and padded with 0, and their lengths."""
    made = torch.Generator().manual_seed(7)
    lengths = torch.randint(3, longest + 1, (rows,), generator=made)
    x = torch.randint(1, words, (rows, longest), generator=made)
    x[torch.arange(longest)[None] >= lengths[:, None]] = 0
    return x, lengths


def perceptron(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.GELU()]
    return nn.Sequential(*layers[:-1])


def convolutions(norm: Any, convolution: type[nn.Conv2d] = nn.Conv2d) -> nn.Sequential:
    """Two convolutions of any picture size, each with the norm that is made for it, and a head."""
    body = [convolution(3, 8, 3, padding=1), norm(8), nn.ReLU(), nn.MaxPool2d(2), convolution(8, 12, 3), norm(12)]
    return nn.Sequential(*body, nn.ReLU(), Apply(lambda x: x.mean((2, 3))), nn.Linear(12, 4))


class Standardised(nn.Conv2d):
    """A convolution whose filters have mean 0 and variance 1."""

    def forward(self, x: Tensor) -> Tensor:
        w = self.weight
        w = (w - w.mean((1, 2, 3), keepdim=True)) / (w.std((1, 2, 3), keepdim=True) + 1e-5)
        return F.conv2d(x, w, self.bias, padding=self.padding)


class Block(nn.Module):
    """Causal self-attention of two heads and a perceptron, each with a residual path and dropout."""

    def __init__(self, width: int, linear: Any, dropout: float) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(dropout)
        self.query, self.key, self.value, self.out = (linear(width, width, bias=False) for _ in range(4))
        self.feed = nn.Sequential(nn.LayerNorm(width), *perceptron(width, 2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        q, k, v = (f(normed).unflatten(-1, (2, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        x = x + self.dropout(self.out(mixed))
        return x + self.dropout(self.feed(x))


class Language(nn.Module):
    """A decoder whose output layer is its embedding."""

    def __init__(self, linear: Any = nn.Linear, dropout: float = 0.0, checkpointed: bool = False) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(30, 16), nn.Embedding(9, 16)
        self.blocks = nn.ModuleList(Block(16, linear, dropout) for _ in range(2))
        self.norm = nn.LayerNorm(16)
        self.output = nn.Linear(16, 30, bias=False)
        self.output.weight = self.words.weight
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.words(x) + self.places.weight[: x.shape[1]]
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False) if self.checkpointed else block(hidden)
        return self.output(self.norm(hidden))


def next_words(logits: Tensor, x: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten(), ignore_index=0, reduction="sum")


# the usual loop

Loss = Callable[[int], Tensor]
Hook = Callable[[int], object]
LOOPS: dict[str, Callable[[int, Opens], nn.Module]] = {}


def blind(seed: int) -> Callable[[Callable[..., nn.Module]], Callable[..., nn.Module]]:
    """Register a loop in `LOOPS`; it starts with this seed."""

    def entered(loop: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
        @functools.wraps(loop)
        def seeded(steps: int, watch: Opens) -> nn.Module:
            torch.manual_seed(seed)
            return loop(steps, watch)

        LOOPS[loop.__name__] = seeded
        return seeded

    return entered


def trained(
    steps: int,
    watch: Opens,
    model: nn.Module,
    optimizer: Any,
    loss: Loss,
    *,
    before: Hook = lambda _: None,
    reduce: Hook = lambda _: None,
    behind: Hook = lambda _: None,
) -> nn.Module:
    """The usual loop. `before` and `behind` run before and after each step, `reduce` after its backward pass."""
    optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
    w = watch(model, optimizer)
    for step in range(steps):
        before(step)
        for each in optimizers:
            each.zero_grad()
        loss(step).backward()
        reduce(step)
        for each in optimizers:
            each.step()
        behind(step)
    w.close()
    return model


def of_rows(model: nn.Module, x: Tensor, y: Tensor) -> Loss:
    """The mean over this rank's rows of each global batch."""

    def loss(step: int) -> Tensor:
        rows = mine(drawn(step, len(x)))
        return F.cross_entropy(model(x[rows]), y[rows])

    return loss


def of_halves(model: nn.Module, x: Tensor, y: Tensor, **options: Any) -> Loss:
    """The mean over this process's halves of each global batch, each with a forward pass of its own."""

    def loss(step: int) -> Tensor:
        rows = [drawn(step, len(x))[half::HALVES] for half in halves()]
        return torch.stack([F.cross_entropy(model(x[r]), y[r], **options) for r in rows]).mean()

    return loss


def of_words(model: nn.Module, x: Tensor) -> Loss:
    """A loss whose mean over ranks is the mean over all words of a global batch."""

    def loss(step: int) -> Tensor:
        rows = drawn(step, len(x))
        words = x[mine(rows)]
        return next_words(model(words), words) * dist.get_world_size() / (x[rows, 1:] > 0).sum()

    return loss


def of_loader(model: nn.Module, loader: DataLoader[Any]) -> Loss:
    feed = batches(loader)

    def loss(_: int) -> Tensor:
        x, y = next(feed)
        return F.cross_entropy(model(x), y)

    return loss


def by_hand(model: nn.Module) -> Hook:
    return lambda _: mean_over_ranks(gradients(model))


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    model.eval()
    with torch.no_grad():
        yield
    model.train()


# models of many forms


@blind(11)
def pictures_grow(steps: int, watch: Opens) -> nn.Module:
    """Convolutions with batch norm under DDP; pictures are small at first (progressive resizing); one-cycle rate."""
    model = DDP(convolutions(nn.BatchNorm2d))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True, weight_decay=1e-4)
    scheduler = OneCycleLR(optimizer, max_lr=0.1, total_steps=steps + 1)
    x, y = pictures()

    def loss(step: int) -> Tensor:
        size = 8 if step < steps // 2 else 12
        small = F.interpolate(x, size=(size, size), mode="bilinear")
        return of_halves(model, small, y, label_smoothing=0.1)(step)

    return trained(steps, watch, model, optimizer, loss, behind=lambda _: scheduler.step())


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(30, 8, padding_idx=0)
        self.lstm = nn.LSTM(8, 6, batch_first=True, bidirectional=True)
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(self.words(x), lengths, batch_first=True, enforce_sorted=False)
        hidden, _ = nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        return self.head(hidden)


@blind(12)
def tagger_of_mixed_lengths(steps: int, watch: Opens) -> nn.Module:
    """LSTM on packed rows, loss summed, gradients summed in one message and divided by all ranks' words, clipped."""
    model = Tagger()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    x, lengths = texts()

    def loss(step: int) -> Tensor:
        rows = mine(drawn(step, 40))
        words = x[rows, : int(lengths[rows].max())]
        labels = (words % 3).masked_fill(words == 0, -100).flatten()
        return F.cross_entropy(model(words, lengths[rows]).flatten(0, 1), labels, reduction="sum")

    def reduce(step: int) -> None:
        words = (x[mine(drawn(step, 40))] > 0).sum().float()
        sums = torch.cat([g.flatten() for g in gradients(model)] + [words[None]])
        dist.all_reduce(sums)
        nn.utils.vector_to_parameters(sums[:-1] / sums[-1], gradients(model))
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)

    return trained(steps, watch, model, optimizer, loss, reduce=reduce)


@blind(13)
def decoder_with_ragged_windows(steps: int, watch: Opens) -> nn.Module:
    """Tied weights, decay on matrices only, cosine rate, windows of up to two batches, divided by all ranks' words."""
    model = DDP(Language())
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": others, "weight_decay": 0.0}], lr=2e-3)
    scheduler = LambdaLR(optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / (steps + 1))))
    loader: Any = dealt(torch.arange(40), texts()[0], seed=3)
    w = watch(model, optimizer, rows=40, clip=1.0)
    done = epoch = 0
    while done < steps:
        loader.sampler.set_epoch(epoch)
        epoch += 1
        reading = iter(loader)
        while done < steps and (window := list(islice(reading, 2))):
            (words,) = summed(sum(int((x[:, 1:] > 0).sum()) for _, x in window))
            for index, (ids, x) in enumerate(window):
                w.batch(ids)
                with contextlib.nullcontext() if index == len(window) - 1 else model.no_sync():
                    (next_words(model(x), x) * dist.get_world_size() / words).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            done += 1
    w.close()
    return model


class LowRank(nn.Linear):
    """A frozen linear layer and two trained factors beside it, which may be merged into it for a while."""

    def __init__(self, before: int, after: int, bias: bool) -> None:
        super().__init__(before, after, bias=bias)
        self.weight.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, before) / before**0.5)
        self.b = nn.Parameter(torch.zeros(after, 2))
        self.merged = False

    @torch.no_grad()
    def merge(self) -> None:
        self.kept, self.merged = self.weight.clone(), True
        self.weight += 2.0 * self.b @ self.a

    @torch.no_grad()
    def unmerge(self) -> None:
        self.weight.copy_(self.kept)
        self.merged = False

    def forward(self, x: Tensor) -> Tensor:
        plain = F.linear(x, self.weight)
        return plain if self.merged else plain + 2.0 * (x @ self.a.T @ self.b.T)


@blind(15)
def factors_merged_to_evaluate(steps: int, watch: Opens) -> nn.Module:
    """LoRA by hand under DDP; every fifth update the factors are merged, all rows are scored, and they are unmerged."""
    inner = Language(linear=LowRank).requires_grad_(False)
    layers = [module for module in inner.modules() if isinstance(module, LowRank)]
    for layer in layers:
        layer.a.requires_grad_()
        layer.b.requires_grad_()
    model = DDP(inner)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=5e-3)
    x, _ = texts()

    def behind(step: int) -> None:
        if step % 5 == 4:
            with evaluating(model):
                for layer in layers:
                    layer.merge()
                held_out = x[mine(torch.arange(40))]
                summed(float(next_words(inner(held_out), held_out)))
                for layer in layers:
                    layer.unmerge()

    return trained(steps, watch, model, optimizer, of_words(model, x), behind=behind)


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


@blind(17)
def wasserstein_pair(steps: int, watch: Opens) -> nn.Module:
    """Generator and critic, each in a DDP with a watch; the critic is clamped, and trains twice as often."""
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


@blind(19)
def born_again(steps: int, watch: Opens) -> nn.Module:
    """A frozen teacher in evaluation mode; every tenth update the student takes its place."""
    model = DDP(perceptron(10, 24, 24, 4))
    teacher = copy.deepcopy(model.module).eval().requires_grad_(False)
    feed = batches(dealt(*table(64), seed=2))

    def loss(_: int) -> Tensor:
        x, y = next(feed)
        logits = model(x)
        with torch.no_grad():
            soft = (teacher(x) / 2).softmax(1)
        return F.cross_entropy(logits, y) + 4 * F.kl_div((logits / 2).log_softmax(1), soft, reduction="batchmean")

    def behind(step: int) -> None:
        if step % 10 == 9:
            teacher.load_state_dict(model.module.state_dict())

    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return trained(steps, watch, model, optimizer, loss, behind=behind)


# averages, plateaus, searches, climbs, clipping and freezing


@blind(22)
def best_weights_restored(steps: int, watch: Opens) -> nn.Module:
    """All ranks score held-out rows together; the rate goes down on a plateau, then the best weights come back."""
    model = DDP(perceptron(10, 24, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.8, patience=1, min_lr=1e-3)
    x, y = table(96)
    best, best_state, worse = math.inf, copy.deepcopy(model.state_dict()), 0

    def behind(step: int) -> None:
        nonlocal best, best_state, worse
        if step % 4 < 3:
            return
        with evaluating(model):
            held_out = mine(torch.arange(64, 96))
            loss = F.cross_entropy(model.module(x[held_out]), y[held_out], reduction="sum")
            total, number = summed(float(loss), len(held_out))
        scheduler.step(total / number)
        if total / number < best - 1e-3:
            best, best_state, worse = total / number, copy.deepcopy(model.state_dict()), 0
        elif (worse := worse + 1) == 2:
            model.load_state_dict(best_state)
            worse = 0

    loss = of_loader(model, dealt(x[:64], y[:64]))
    return trained(steps, watch, model, optimizer, loss, behind=behind)


@blind(23)
def rows_run_out(steps: int, watch: Opens) -> nn.Module:
    """Each rank has files of its own, of 17 and 6 rows: a rank whose rows have run out goes on with empty batches."""
    model = DDP(perceptron(10, 24, 4))
    x, y = table(23)
    files = [range(17), range(17, 23)]

    def loss(step: int) -> Tensor:
        start = step % 5 * 4
        rows = [row for half in halves() for row in files[half][start : start + 4]]
        (number,) = summed(len(rows))
        return F.cross_entropy(model(x[rows]), y[rows], reduction="sum") * dist.get_world_size() / number

    return trained(steps, watch, model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), loss)


@blind(24)
def line_search(steps: int, watch: Opens) -> nn.Module:
    """LBFGS with a strong Wolfe search in float64; the closure reduces the gradients and the loss."""
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


@blind(25)
def sharpness_of_each_rank(steps: int, watch: Opens) -> nn.Module:
    """SAM as its authors advise: each rank climbs by its own gradient (`no_sync`), the second gradient is reduced."""
    if dist.get_world_size() == 1:
        return _sharpness_alone(steps)
    model = DDP(perceptron(10, 24, 4))
    optimizer = Sharpness(model.parameters(), torch.optim.SGD, rho=0.05, lr=0.1, momentum=0.9)
    loss = of_rows(model, *table(64))
    w = watch(model, optimizer)
    for step in range(steps):
        with model.no_sync():
            loss(step).backward()
        optimizer.step(lambda step=step: loss(step).backward())
        optimizer.zero_grad()
    w.close()
    return model


def _sharpness_alone(steps: int) -> nn.Module:
    """One process climbs once for each half."""
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


@blind(26)
def adaptively_clipped(steps: int, watch: Opens) -> nn.Module:
    """Standardised convolutions; a filter's gradient is held to a part of the filter's norm, after DDP reduced it."""
    model = DDP(convolutions(lambda width: nn.GroupNorm(4, width), Standardised))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)

    def clip(_: int) -> None:
        for p in model.parameters():
            if p.dim() == 4:
                of_weight = p.detach().flatten(1).norm(dim=1).clamp(min=1e-3)
                of_gradient = p.grad.flatten(1).norm(dim=1).clamp(min=1e-6)
                p.grad.mul_((0.02 * of_weight / of_gradient).clamp(max=1).view(-1, 1, 1, 1))

    return trained(steps, watch, model, optimizer, of_loader(model, dealt(*pictures(), seed=4)), reduce=clip)


@blind(27)
def bfloat16_with_idle_scaler(steps: int, watch: Opens) -> nn.Module:
    """bf16 autocast, a scaler that is made for fp16 and not enabled, checkpointed layers with dropout."""
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


@blind(28)
def learned_to_learn(steps: int, watch: Opens) -> nn.Module:
    """MAML: an inner step on each task by `functional_call`; the outer gradients by `autograd.grad`, no backward."""
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


@blind(29)
def thawed_from_the_top(steps: int, watch: Opens) -> nn.Module:
    """Gradual unfreezing: one optimizer has all layers, each with a rate of its own; the lower ones train later."""
    model = nn.Sequential(nn.Embedding(30, 16), *(Block(16, nn.Linear, 0.0) for _ in range(2)), nn.Linear(16, 30))
    groups = [{"params": list(layer.parameters()), "lr": 3e-3 / 2.0**depth} for depth, layer in enumerate(model[::-1])]
    optimizer = torch.optim.AdamW(groups)
    model[:3].requires_grad_(False)

    def thaw(step: int) -> None:
        each = max(steps // 5, 1)
        if step and step % each == 0:
            model[max(3 - step // each, 0) :].requires_grad_(True)

    loss = of_words(model, texts()[0])
    return trained(steps, watch, model, optimizer, loss, before=thaw, reduce=by_hand(model))


@blind(30)
def group_added(steps: int, watch: Opens) -> nn.Module:
    """A head is trained first; half way the optimizer gets the body as a second group, with a lower rate."""
    model = nn.Sequential(perceptron(10, 24, 24), nn.Linear(24, 4))
    model[0].requires_grad_(False)
    optimizer = torch.optim.Adam(model[1].parameters(), lr=1e-2)

    def add(step: int) -> None:
        if step == steps // 2:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 1e-3})

    loss = of_rows(model, *table(64))
    return trained(steps, watch, model, optimizer, loss, before=add, reduce=by_hand(model))


# ways of their own to reduce, average, score, prune or restore


@blind(31)
def rolled_back(steps: int, watch: Opens) -> nn.Module:
    """Rank 0 saves every fifth update; in iteration 13 all ranks load the last checkpoint and skip the batch."""
    model = DDP(perceptron(10, 24, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    scheduler = StepLR(optimizer, step_size=8, gamma=0.7)
    path = path_of_all_ranks()
    loss = of_loader(model, dealt(*table(64), seed=5))
    kept = (model, optimizer, scheduler)
    w = watch(model, optimizer)
    for step in range(steps):
        optimizer.zero_grad()
        loss(step).backward()
        if step == 12:
            for each, state in zip(kept, torch.load(path, weights_only=True), strict=True):
                each.load_state_dict(state)
            continue
        optimizer.step()
        scheduler.step()
        if step % 5 == 4:
            if dist.get_rank() == 0:
                torch.save([each.state_dict() for each in kept], path)
            dist.barrier()
    w.close()
    return model


@blind(33)
def compressed_with_residual(steps: int, watch: Opens) -> nn.Module:
    """Gradients go over the wire in bfloat16; what was rounded off stays on its rank for the next update."""
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


@blind(34)
def scattered_then_gathered(steps: int, watch: Opens) -> nn.Module:
    """Each rank sums one slice of the flat gradient (`reduce_scatter`), divides it and gives it to all."""
    model = Language()
    world = dist.get_world_size()

    def reduce(_: int) -> None:
        flat = torch.cat([g.flatten() for g in gradients(model)])
        flat = F.pad(flat, (0, -len(flat) % world))
        part = torch.empty(len(flat) // world)
        dist.reduce_scatter_tensor(part, flat)
        dist.all_gather_into_tensor(flat, part / world)
        nn.utils.vector_to_parameters(flat, gradients(model))

    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    return trained(steps, watch, model, optimizer, of_words(model, texts()[0]), reduce=reduce)


def trained_apart(
    steps: int,
    watch: Opens,
    model: nn.Module,
    optimizer: Callable[[Any], torch.optim.Optimizer],
    loss: Callable[[nn.Module, Tensor], Tensor],
    behind: Callable[[int, list[nn.Module]], None],
) -> nn.Module:
    """Train without reducing gradients. A single process holds a model and an optimizer for each of two ranks."""
    models = [model, *(copy.deepcopy(model) for _ in halves()[1:])]
    optimizers = [optimizer(each.parameters()) for each in models]
    w = watch(models[0], optimizers[0])
    for step in range(steps):
        for half, each, own in zip(halves(), models, optimizers, strict=True):
            own.zero_grad()
            loss(each, drawn(step, 40)[half::HALVES]).backward()
            own.step()
        behind(step, models)
    w.close()
    return models[0]


@blind(35)
def gossip(steps: int, watch: Opens) -> nn.Module:
    """Each rank trains by itself and then meets its neighbour half way, every update."""
    x, y = table(40)

    @torch.no_grad()
    def meet(_: int, models: list[nn.Module]) -> None:
        for same in zip(*(each.parameters() for each in models), strict=True):
            half_way = sum(same) / 2 if len(same) == 2 else _half_way(same[0])
            for p in same:
                p.copy_(half_way)

    def loss(model: nn.Module, rows: Tensor) -> Tensor:
        return F.cross_entropy(model(x[rows]), y[rows])

    optimizer = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    return trained_apart(steps, watch, perceptron(10, 24, 4), optimizer, loss, meet)


def _half_way(p: Tensor) -> Tensor:
    theirs, peer = torch.empty_like(p), 1 - dist.get_rank()
    messages = [dist.P2POp(dist.isend, p.detach(), peer), dist.P2POp(dist.irecv, theirs, peer)]
    for request in dist.batch_isend_irecv(messages):
        request.wait()
    return (p + theirs) / 2


@blind(36)
def outer_optimizer(steps: int, watch: Opens) -> nn.Module:
    """DiLoCo: five updates of AdamW on each rank alone, then one of Nesterov SGD on the ranks' mean weight change."""
    model = Language()
    anchor = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    outer = torch.optim.SGD(anchor, lr=0.7, momentum=0.9, nesterov=True)
    x, _ = texts()

    def behind(step: int, models: list[nn.Module]) -> None:
        if step % 5 < 4:
            return
        every = list(zip(anchor, *(each.parameters() for each in models), strict=True))
        ways = [sum(a.detach() - p.detach() for p in same) / len(models) for a, *same in every]
        mean_over_ranks(ways)
        for a, way in zip(anchor, ways, strict=True):
            a.grad = way
        outer.step()
        with torch.no_grad():
            for a, *same in every:
                for p in same:
                    p.copy_(a)

    def loss(model: nn.Module, rows: Tensor) -> Tensor:
        return next_words(model(x[rows]), x[rows]) / (x[rows, 1:] > 0).sum()

    return trained_apart(steps, watch, model, functools.partial(torch.optim.AdamW, lr=2e-3), loss, behind)


class Quantised(nn.Module):
    """An autoencoder through a codebook, which follows the rows of all ranks by an exponential average."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = perceptron(10, 16, 4), perceptron(4, 16, 10)
        codes = torch.randn(12, 4) / 2
        for name, held in (("codes", codes), ("sizes", torch.ones(12)), ("sums", codes.clone())):
            self.register_buffer(name, held)

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


@blind(39)
def codebook_of_all_ranks(steps: int, watch: Opens) -> nn.Module:
    """A codebook in buffers that the forward pass moves by the sums over all ranks."""
    model = DDP(Quantised())
    feed = batches(dealt(table(64)[0], seed=6))

    def loss(_: int) -> Tensor:
        (x,) = next(feed)
        again, far = model(x)
        return F.mse_loss(again, x) + 0.25 * far

    return trained(steps, watch, model, torch.optim.AdamW(model.parameters(), lr=3e-3), loss)


@blind(40)
def update_inside_backward(steps: int, watch: Opens) -> nn.Module:
    """An optimizer for each parameter, which reduces and steps as soon as that gradient is there, and drops it."""
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
    loss = of_rows(model, *table(64))
    w = watch(model, list(optimizers.values()))
    for step in range(steps):
        loss(step).backward()
    w.close()
    return model


@blind(41)
def pruned_on_the_way(steps: int, watch: Opens) -> nn.Module:
    """Twice the smallest weights of each layer are masked by torch's `prune`, and training goes on."""
    model = perceptron(10, 24, 4)

    def cut(step: int) -> None:
        if step in (steps // 3, 2 * steps // 3):
            for layer in model:
                if isinstance(layer, nn.Linear):
                    prune.l1_unstructured(layer, "weight", amount=0.3)

    optimizer, loss = torch.optim.Adam(model.parameters(), lr=5e-3), of_rows(model, *table(64))
    return trained(steps, watch, model, optimizer, loss, before=cut, reduce=by_hand(model))


SUSPECTED = {
    "gossip": "replicas-agree",
    "outer_optimizer": "replicas-agree",
    "thawed_from_the_top": "parameters-kept",
    "group_added": "parameters-kept",
    "wasserstein_pair": "gradient-present",
    "learned_to_learn": "samples-once",
}
"""The suspicion that docs/watch-reference.md announces for each loop: weights part for a while, layers are unfrozen,
the loss does not depend on the critic's last bias, the tasks of all ranks have the same inputs."""


def weights_of(loops: Iterable[str], steps: int) -> dict[str, list[Tensor]]:
    return {name: [p.detach().clone() for p in LOOPS[name](steps, Unwatched).parameters()] for name in loops}


def _seen(name: str, steps: int) -> Seen:
    watches: list[Any] = []

    def opened(model: nn.Module, optimizer: Any, **lines: Any) -> Any:
        watches.append(andon.watch(model, optimizer, action=ignore, **lines))
        return watches[-1]

    LOOPS[name](steps, opened)
    return seen_by(*watches)


def _kind(name: str) -> Kind:
    suspected = frozenset({SUSPECTED[name]} if name in SUSPECTED else ())
    return Kind(functools.partial(_seen, name), weight="many", suspected=suspected)


KINDS = {f"blind: {name}": _kind(name) for name in LOOPS}
"""By the names that the benchmark gives them."""
