"""Correct training loops of many forms, most of them by an author who had not read the code of the watch.

A loop trains `steps` updates on any number of ranks and returns the trained model. One process trains on the whole
global batch and gets the same weights up to rounding, unless the loop's docstring says otherwise.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable
from itertools import islice, pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import prune
from torch.optim.lr_scheduler import LambdaLR, StepLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import andon
from tests.watch.clean import Kind, Seen, ignore, path_of_all_ranks, seen_by

BATCH = 8


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


def mine(rows: Tensor) -> Tensor:
    return rows[dist.get_rank() :: dist.get_world_size()]


def drawn(step: int, rows: int, size: int = BATCH) -> Tensor:
    """The rows of the global batch of a step: passes over all rows, each in an order of its own."""
    a_pass = rows // size
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(step // a_pass))
    return order[step % a_pass * size :][:size]


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


def texts(rows: int = 40, longest: int = 9, words: int = 30) -> Tensor:
    """Rows of words, of 3 to `longest` of them and padded with 0."""
    made = torch.Generator().manual_seed(7)
    lengths = torch.randint(3, longest + 1, (rows,), generator=made)
    x = torch.randint(1, words, (rows, longest), generator=made)
    x[torch.arange(longest)[None] >= lengths[:, None]] = 0
    return x


def perceptron(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.GELU()]
    return nn.Sequential(*layers[:-1])


def attention() -> nn.Module:
    # A bias of keys has no gradient but rounding, which Adam makes as large as any other.
    return nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, bias=False)


def next_words(logits: Tensor, x: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten(), ignore_index=0, reduction="sum")


# the usual loop

Loss = Callable[[int], Tensor]
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
    optimizer: torch.optim.Optimizer,
    loss: Loss,
    before: Callable[[int], object] = lambda _: None,
) -> nn.Module:
    """The usual loop, which reduces by hand where DDP does not. `before` runs before each step."""
    w = watch(model, optimizer)
    for step in range(steps):
        before(step)
        optimizer.zero_grad()
        loss(step).backward()
        if not isinstance(model, DDP):
            mean_over_ranks(gradients(model))
        optimizer.step()
    w.close()
    return model


def of_rows(model: nn.Module, x: Tensor, y: Tensor) -> Loss:
    """The mean over this rank's rows of each global batch."""

    def loss(step: int) -> Tensor:
        rows = mine(drawn(step, len(x)))
        return F.cross_entropy(model(x[rows]), y[rows])

    return loss


def of_words(model: nn.Module, x: Tensor) -> Loss:
    """A loss whose mean over ranks is the mean over all words of a global batch."""

    def loss(step: int) -> Tensor:
        rows = drawn(step, len(x))
        words = x[mine(rows)]
        return next_words(model(words), words) * dist.get_world_size() / (x[rows, 1:] > 0).sum()

    return loss


# models of many forms


@blind(13)
def words_in_ragged_windows(steps: int, watch: Opens) -> nn.Module:
    """Tied weights, decay on matrices only, cosine rate, windows of up to two batches, divided by all ranks' words."""
    inner = nn.Sequential(nn.Embedding(30, 16), attention(), attention(), nn.Linear(16, 30, bias=False))
    inner[-1].weight = inner[0].weight
    model = DDP(inner)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": others, "weight_decay": 0.0}], lr=2e-3)
    scheduler = LambdaLR(optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / (steps + 1))))
    rows = TensorDataset(torch.arange(40), texts())
    sampler: Any = DistributedSampler(rows, seed=3)
    loader = DataLoader(rows, BATCH // dist.get_world_size(), sampler=sampler)
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
                with contextlib.nullcontext() if index == len(window) - 1 else model.no_sync():
                    (next_words(model(x), x) * dist.get_world_size() / words).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            done += 1
    w.close()
    return model


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


# rows that run out, and freezing


@blind(23)
def rows_run_out(steps: int, watch: Opens) -> nn.Module:
    """Each rank has files of its own, of 17 and 6 rows: a rank whose rows have run out goes on with empty batches."""
    model = DDP(perceptron(10, 24, 4))
    x, y = table(23)
    files = [range(17), range(17, 23)]

    def loss(step: int) -> Tensor:
        start = step % 5 * 4
        rows = [row for half in mine(torch.arange(2)) for row in files[half][start : start + 4]]
        (number,) = summed(len(rows))
        return F.cross_entropy(model(x[rows]), y[rows], reduction="sum") * dist.get_world_size() / number

    return trained(steps, watch, model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), loss)


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
    model = nn.Sequential(nn.Embedding(30, 16), attention(), attention(), nn.Linear(16, 30))
    groups = [{"params": list(layer.parameters()), "lr": 3e-3 / 2.0**depth} for depth, layer in enumerate(model[::-1])]
    optimizer = torch.optim.AdamW(groups)
    model[:3].requires_grad_(False)

    def thaw(step: int) -> None:
        each = max(steps // 5, 1)
        if step and step % each == 0:
            model[max(3 - step // each, 0) :].requires_grad_(True)

    loss = of_words(model, texts())
    return trained(steps, watch, model, optimizer, loss, thaw)


# ways of their own to restore and prune


@blind(31)
def rolled_back(steps: int, watch: Opens) -> nn.Module:
    """Rank 0 saves every fifth update; in iteration 13 all ranks load the last checkpoint and skip the batch."""
    model = DDP(perceptron(10, 24, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    scheduler = StepLR(optimizer, step_size=8, gamma=0.7)
    path = path_of_all_ranks()
    loss = of_rows(model, *table(64))
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
    return trained(steps, watch, model, optimizer, loss, cut)


SUSPECTED = {
    "thawed_from_the_top": "parameters-kept",
    "wasserstein_pair": "gradient-present",
    "learned_to_learn": "samples-once",
}
"""The suspicion that docs/watch-reference.md announces for each loop: layers are unfrozen,
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


KINDS = {f"blind: {name}": _kind(name) for name in LOOPS}  # by the names that the benchmark gives them
