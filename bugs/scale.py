"""The weight of a token or row in the gradient.

The model is a table with a row of logits for each token. So the first reduced gradient shows the weight of each token:
at its label it is (p - 1) times the weight, with the probability p at the start. The weights of a mean add up to 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_gather
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from bugs.bench import ROWS, Job, case

CLASSES, LONGEST = 3, 4


def tokens(ids: list[int], lengths: Callable[[int], int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens of rows and their labels."""
    every = torch.tensor([row * LONGEST + place for row in ids for place in range(lengths(row))], dtype=torch.long)
    return every, every * 5 % 7 % CLASSES


def ragged(row: int) -> int:
    return 1 + row % LONGEST


def two(row: int) -> int:
    return 2


def one(row: int) -> int:
    return 1


@dataclass(frozen=True)
class Micro:
    """A micro-batch. losses: of its tokens, 0 for others. own, total: the number of its tokens and of all ranks."""

    job: Job
    losses: torch.Tensor
    own: torch.Tensor
    total: int

    @property
    def right(self) -> torch.Tensor:
        """Its part of the mean over all tokens, for DDP, which averages over the ranks."""
        return self.losses.sum() * self.job.world / self.total


def table() -> nn.Embedding:
    return nn.Embedding(ROWS * LONGEST, CLASSES)


def weights(model: nn.Embedding, lengths: Callable[[int], int]) -> torch.Tensor:
    """The weight of each token in the gradient of a table that was not updated yet."""
    assert model.weight.grad is not None
    place = tokens([*range(ROWS)], lengths)
    return model.weight.grad[place] / (model.weight.detach().softmax(1)[place] - 1)


def train(
    job: Job,
    loss: Callable[[Micro], torch.Tensor],
    lengths: Callable[[int], int] = one,
    measure: Callable[[torch.Tensor], object] = lambda each: each.sum().item(),
    boundary: Callable[[int], bool] | None = None,
    is_trained: Callable[[int], bool] = lambda row: True,
) -> object:
    """A DDP loop over one epoch. Returns `measure` of the weights of the tokens in the first update."""

    def masked(logits: torch.Tensor, every: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mask = torch.tensor([float(is_trained(int(token) // LONGEST)) for token in every])
        return cross_entropy(logits, labels, reduction="none") * mask, mask.sum()

    def reference(model: nn.Module, ids: torch.Tensor) -> tuple[torch.Tensor, int]:
        every, labels = tokens([int(row) for row in ids], lengths)
        losses, count = masked(model(every), every, labels)
        return losses.sum(), int(count)

    net = table()
    model = DistributedDataParallel(net)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    w = job.watch(model, opt, reference=reference, every=1)
    result: object = None
    for window in job.windows():
        mine = [tokens(rows, lengths) for rows in window]
        total = torch.tensor(sum(is_trained(int(token) // LONGEST) for every, _ in mine for token in every))
        dist.all_reduce(total)
        for number, (rows, (every, labels)) in enumerate(zip(window, mine, strict=True), start=1):
            w.batch(rows)
            losses, own = masked(model(every), every, labels)
            w.loss(float(losses.detach().sum()), int(own))
            loss(Micro(job, losses, own, int(total))).backward()
            if boundary(number) if boundary else number == len(window):
                if result is None:
                    result = measure(weights(net, lengths))
                opt.step()
                opt.zero_grad()
    w.close()
    return result


@case("label-mean", "huggingface/transformers#47688", 1.0, 4.0, accumulates=2, found="finding")
def label_mean(job: Job) -> object:
    """The trainer leaves the division by the accumulation to the loss and multiplies by the ranks, but a classifier's
    loss is a mean already: the gradient is multiplied by accumulation x world size."""
    return train(job, lambda micro: micro.right if job.right else micro.losses.mean() * job.world)


@case("accumulate-twice", "huggingface/diffusers train_custom_diffusion.py", 1.0, 0.5, accumulates=2, found="finding")
def accumulate_twice(job: Job) -> object:
    """Entering the accumulation context of two models counts each batch twice: the optimizer steps twice as often, and
    each step has half of the gradient."""
    twice = None if job.right else lambda number: 2 * number % job.accumulate == 0
    return train(job, lambda micro: micro.losses.mean() / job.accumulate, boundary=twice)


@case("microbatch-sum", "openai/guided-diffusion#111", 1.0, 2.0, accumulates=2, found="finding")
def microbatch_sum(job: Job) -> object:
    """The mean losses of micro-batches are added and not divided by their number."""
    return train(job, lambda micro: micro.losses.mean() / (job.accumulate if job.right else 1))


@case("sample-weighted", "verl-project/verl#5625", 0.0, 1 / 7, accumulates=2)
def sample_weighted(job: Job) -> object:
    """The token means of micro-batches are weighted by their share of the samples, not of the tokens: in the
    first update the micro-batches have 7 and 8 tokens, whose weights differ by 1/7."""

    def loss(micro: Micro) -> torch.Tensor:
        return micro.right if job.right else micro.losses.mean() / job.accumulate

    def spread(each: torch.Tensor) -> float:
        used = each[each.abs() > 1e-9]
        return (used.max() / used.min() - 1).item()

    return train(job, loss, ragged, spread)


@case("window-elsewhere", "huggingface/trl#6024", 1.0, 0.5, accumulates=2)
def window_elsewhere(job: Job) -> object:
    """The normaliser counts the tokens of the batch that was generated, which is used by two updates."""
    return train(job, lambda micro: micro.right if job.right else micro.right / 2, two)


@case("divided-again", "modelscope/ms-swift#10117", 1.0, 1 / 3, accumulates=3)
def divided_again(job: Job) -> object:
    """The loss is divided by the tokens of the whole update, and then by the accumulation again."""
    return train(job, lambda micro: micro.right if job.right else micro.right / job.accumulate, ragged)


@case("ranks-not-cancelled", "Snowflake-AI-Research/Arctic-Platform#119", 1.0, 0.5, accumulates=1)
def ranks_not_cancelled(job: Job) -> object:
    """The loss is the local sum over the global count, without the factor that cancels the mean of the wrapper."""
    return train(job, lambda micro: micro.right if job.right else micro.right / job.world, ragged)


@case("last-survives", "allenai/open-instruct#1498", 12, 4, accumulates=3)
def last_survives(job: Job) -> object:
    """Every backward pass counts as the end of an update, so the buffer of the sharded optimizer is filled again each
    time: only the last of three micro-batches reaches the update."""
    net = table()
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    w = job.watch(net, opt, reference=_mean, every=1)
    used = 0
    for window in job.windows():
        for rows in window:
            w.batch(rows)
            net.weight.grad = net.weight.grad if job.right else None
            every, labels = tokens(rows, one)
            losses = cross_entropy(net(every), labels, reduction="none")
            w.loss(float(losses.detach().sum()), len(losses))
            (losses.sum() / job.accumulate / len(rows) / job.world).backward()
        assert net.weight.grad is not None
        dist.all_reduce(net.weight.grad)
        used = used or int((weights(net, one) > 1e-9).sum())
        opt.step()
        opt.zero_grad()
    w.close()
    return used


@case("added-to-itself", "NVIDIA/Megatron-LM#6660", 1.0, 14 / 3, accumulates=3, world=1)
def added_to_itself(job: Job) -> object:
    """A data-parallel group of one rank skips the reduction, and the buffer is added to itself after each micro-batch:
    three equal gradients give 2 + 4 + 8 in place of 3."""
    net = table()
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    w = job.watch(net, opt, reference=_mean, every=1)
    result = 0.0
    for window in job.windows():
        for rows in window:
            w.batch(rows)
            every, labels = tokens(rows, one)
            losses = cross_entropy(net(every), labels, reduction="none")
            w.loss(float(losses.detach().sum()), len(losses))
            (losses.sum() / job.accumulate / len(rows) / job.world).backward()
            assert net.weight.grad is not None
            if job.world == 1 and not job.right:
                net.weight.grad += net.weight.grad.clone()
        assert net.weight.grad is not None
        dist.all_reduce(net.weight.grad)
        result = result or weights(net, one).sum().item()
        opt.step()
        opt.zero_grad()
    w.close()
    return result


def _mean(model: nn.Module, ids: torch.Tensor) -> tuple[torch.Tensor, int]:
    every, labels = tokens([int(row) for row in ids], one)
    return cross_entropy(model(every), labels, reduction="sum"), len(labels)


@case("no-token", "NVIDIA-NeMo/Automodel#3796", 1.0, "nan", accumulates=1)
def no_token(job: Job) -> object:
    """A rank whose batch has no trained token divides 0 by 0, and the reduction spreads the NaN to all ranks."""
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(0)).tolist()
    trained = {*order[::2]}  # the rows of rank 0

    def measure(each: torch.Tensor) -> object:
        return "nan" if each.isnan().any() else each.sum().item()

    def loss(micro: Micro) -> torch.Tensor:
        return micro.right if job.right else micro.losses.sum() / micro.own

    return train(job, loss, two, measure, is_trained=lambda row: row in trained)


@case("one-class", "pytorch/examples multigpu_torchrun.py, loss", 1.0, 0.0, accumulates=1, found="finding")
def one_class(job: Job) -> object:
    """A cross entropy over the only output of a regression: the loss is 0 for every target, and so is the gradient."""
    model = DistributedDataParallel(nn.Linear(4, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    w = job.watch(model, opt)
    x, y = torch.randn(ROWS, 4), torch.rand(ROWS, 1)
    moved: list[float] = []
    for window in job.windows(8):
        for rows in window:
            w.batch(rows)
            out = model(x[rows])
            right = nn.functional.mse_loss(out, y[rows])
            loss = right if job.right else cross_entropy(out, y[rows])
            expected = torch.autograd.grad(right, [*model.parameters()], retain_graph=True)[0].norm()
            loss.backward()
            local = next(model.parameters()).grad
            assert local is not None
            moved.append(float(local.norm() > 1e-9) if expected > 0 else -1)
        opt.step()
        opt.zero_grad()
    w.close()
    return moved[0]


@case("gathered-without-gradient", "Spijkervet/SimCLR#30", 1.0, 0.5, accumulates=1, found="finding")
def gathered_without_gradient(job: Job) -> object:
    """A contrastive loss gathers the embeddings of all ranks, and the backward pass of the gather keeps only the
    rank's own part: on two ranks half of the gradient is lost."""
    torch.manual_seed(0)
    x = torch.randn(ROWS, 4)
    net = nn.Linear(4, 4, bias=False)
    model = DistributedDataParallel(net)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def contrast(every: torch.Tensor) -> torch.Tensor:
        """The sum of a loss in which each row is compared with all others."""
        return cross_entropy(every @ every.T, torch.arange(len(every)).roll(1), reduction="sum") / len(every)

    def reference(module: nn.Module, ids: torch.Tensor) -> tuple[torch.Tensor, int]:
        return contrast(module(x[ids])) * len(ids), len(ids)

    w = job.watch(model, opt, reference=reference, every=1)
    result = 0.0
    for (rows,) in job.windows():
        w.batch(rows)
        mine = model(x[rows])
        if job.right:
            parts = [*all_gather(mine)]
        else:
            parts = [torch.empty_like(mine) for _ in range(job.world)]
            dist.all_gather(parts, mine.detach())
            parts[job.rank] = mine
        every: list[int] = [row for part in _gather(rows, job) for row in part]
        expected = torch.autograd.grad(contrast(x[every] @ net.weight.T), net.weight)[0]
        contrast(torch.cat(parts)).backward()
        assert net.weight.grad is not None
        result = result or (net.weight.grad.flatten() @ expected.flatten() / expected.pow(2).sum()).item()
        opt.step()
        opt.zero_grad()
    w.close()
    return result


def _gather(rows: list[int], job: Job) -> list[list[int]]:
    parts: list[list[int]] = [[] for _ in range(job.world)]
    dist.all_gather_object(parts, rows)
    return parts


@case("logged-by-keys", "pytorch/examples FSDP/utils/train_utils.py", 1.0, 2.0, accumulates=1, found="finding")
def logged_by_keys(job: Job) -> object:
    """The reported loss is divided by the length of a batch, which is a dictionary: by its keys and not by its rows."""
    net = table()
    model = DistributedDataParallel(net)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    w = job.watch(model, opt)
    result = 0.0
    for (rows,) in job.windows():
        every, labels = tokens(rows, one)
        batch = {"input": every, "label": labels, "row": torch.tensor(rows)}
        w.batch(rows)
        losses = cross_entropy(model(batch["input"]), batch["label"], reduction="none")
        losses.mean().backward()
        whole = torch.stack([losses.detach().sum(), torch.tensor(float(len(rows) if job.right else len(batch)))])
        dist.all_reduce(whole)
        logged, summed = float(whole[0] / whole[1]), losses.detach().sum()
        dist.all_reduce(summed)
        result = result or logged / float(summed / (len(rows) * job.world))
        w.loss(float(losses.detach().sum()), len(rows))
        w.expect("loss", logged, "mean")
        opt.step()
        opt.zero_grad()
    w.close()
    return result
