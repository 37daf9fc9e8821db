"""Which rows the ranks train on, and in which order. Rows are recognised by their content."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    Subset,
    TensorDataset,
    random_split,
)

from bugs.bench import GLOBAL_BATCH, ROWS, Job, case

Batches = Iterable[Sequence[torch.Tensor]]


def data(order: Sequence[int] = ()) -> TensorDataset:
    """48 rows whose first number is the row's own number."""
    make = torch.Generator().manual_seed(1)
    inputs = torch.randn(ROWS, 4, generator=make)
    inputs[:, 0] = torch.arange(ROWS) / ROWS
    labels = torch.randint(0, 3, (ROWS,), generator=make)
    chosen = [*order] or [*range(ROWS)]
    return TensorDataset(inputs[chosen], labels[chosen])


def ids(inputs: torch.Tensor) -> list[int]:
    return [int(row) for row in (inputs[:, 0] * ROWS).round()]


def train(job: Job, epochs: Iterable[Batches], limit: int = 0, **further: Any) -> list[list[int]]:
    """A DDP loop. Returns the rows of all ranks, for each epoch. limit: updates of an epoch at most."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    w = job.watch(model, opt, rows=ROWS, **further)
    seen: list[list[int]] = []
    for batches in epochs:
        mine: list[int] = []
        for inputs, labels in itertools.islice(batches, limit or None):
            mine += ids(inputs)
            w.batch(ids(inputs))
            loss = cross_entropy(model(inputs), labels)
            w.loss(loss.item() * len(labels), len(labels))
            loss.backward()
            opt.step()
            opt.zero_grad()
        parts: list[list[int]] = [[] for _ in range(job.world)]
        dist.all_gather_object(parts, mine)
        seen.append([row for part in parts for row in part])
    w.close()
    return seen


def plain(job: Job, rows: Dataset[Any] | None = None, **sampler: Any) -> DataLoader[Any]:
    """The loader of a rank, with a shuffling sampler for all ranks."""
    rows = rows or data()
    return DataLoader(rows, job.batch, sampler=DistributedSampler(rows, job.world, job.rank, **sampler))


def epochs(loader: DataLoader[Any], number: int = 3, *, told: bool = True) -> Iterator[Batches]:
    """The loader for each epoch. If `told`, its sampler receives the epoch."""
    for epoch in range(number):
        if told:
            assert isinstance(loader.sampler, DistributedSampler)
            loader.sampler.set_epoch(epoch)
        yield loader


def different_orders(seen: list[list[int]]) -> int:
    return len({*map(tuple, seen)})


@case("epoch-not-set", "meta-llama/llama-recipes config_utils.py", 3, 1, found="finding")
def epoch_not_set(job: Job) -> object:
    """`set_epoch` is not called, so three epochs have one order."""
    return different_orders(train(job, epochs(plain(job), told=job.right)))


@case("epoch-not-set-drop-last", "NVIDIA/tacotron2#241", 3, 1, found="finding")
def epoch_not_set_drop_last(job: Job) -> object:
    """The same, and the sampler drops the last rows: the dropped rows are never trained."""
    rows = Subset(data(), range(ROWS - 1))
    loader = DataLoader(
        rows,
        job.batch,
        sampler=DistributedSampler(rows, job.world, job.rank, seed=1234, drop_last=True),
        drop_last=True,
    )
    return different_orders(train(job, epochs(loader, told=job.right)))


@case("epoch-not-set-endless", "rosinality/stylegan2-pytorch#319", 3, 1, found="finding")
def epoch_not_set_endless(job: Job) -> object:
    """An endless generator starts the loader again and again, and no loop over epochs exists that could set one."""

    def endless() -> Iterator[Sequence[torch.Tensor]]:
        for batches in epochs(plain(job), 99, told=job.right):
            yield from batches

    stream, size = endless(), ROWS // (job.batch * job.world)
    return different_orders(train(job, (itertools.islice(stream, size) for _ in range(3))))


@case("split-by-rank", "pytorch/examples minGPT-ddp/mingpt/main.py", 0, 7, found="finding")
def split_by_rank(job: Job) -> object:
    """The random split into training and test rows has no common seed, so that each rank tests on rows that the other
    rank trains on."""
    seed = torch.Generator().manual_seed(0 if job.right else job.rank)
    kept, tested = random_split(data(), [36, 12], generator=seed)
    seen = train(job, epochs(plain(job, kept), 2))
    every: list[list[int]] = [[] for _ in range(job.world)]
    dist.all_gather_object(every, [*tested.indices])
    return len({row for part in every for row in part} & {*seen[0]})


@case("one-seed-for-all", "pytorch/examples FSDP2/example.py", 48, 24, found="finding")
def one_seed_for_all(job: Job) -> object:
    """All ranks draw their batches from generators with one seed and do not split them: they train on the same rows."""
    rows, size = data(), job.batch * job.world

    def drawn(epoch: int) -> Iterator[Sequence[torch.Tensor]]:
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(epoch))
        for start in range(0, ROWS, size):
            yield rows[order[start + (job.batch * job.rank if job.right else 0) :][: job.batch]]

    return len({*train(job, map(drawn, range(3)))[0]})


class Shards(IterableDataset[Any]):
    """A stream of shards, from which a rank reads its own."""

    def __init__(self, shards: Sequence[Sequence[int]], skipped: int = 0) -> None:
        self.shards, self.skipped = shards, skipped

    def __iter__(self) -> Iterator[Any]:
        rows = data()
        return (rows[row] for row in itertools.islice(itertools.chain(*self.shards), self.skipped, None))


@case("skip-undoes-split", "huggingface/datasets#8568", 40, 24)
def skip_undoes_split(job: Job) -> object:
    """Skipping rows of a stream that was split between ranks gives the stream before the split: all ranks read the same
    rows, and one rank's share of the epoch is all that is trained."""
    whole = [[*range(start, start + 4)] for start in range(0, ROWS, 4)]
    mine = Shards(whole[job.rank :: job.world])
    again = Shards(mine.shards if job.right else whole, skipped=4)
    seen = train(job, [DataLoader(again, job.batch)] * 2, limit=20 // job.batch + (20 % job.batch > 0))
    return len({*seen[0]})


@case("sharded-twice", "huggingface/accelerate#3520", 48, 24)
def sharded_twice(job: Job) -> object:
    """The sampler gives each rank its share, and the library that prepares the loader shards it a second time: half of
    the rows are trained in no epoch."""

    class Prepared(Sampler[list[int]]):
        """Every world-th batch of a loader."""

        def __init__(self, batches: Iterable[list[int]]) -> None:
            self.batches = batches

        def __iter__(self) -> Iterator[list[int]]:
            return itertools.islice(iter(self.batches), job.rank, None, job.world)

    rows = data()
    shared: Callable[..., DistributedSampler[Any]] = DistributedSampler
    inner = shared(rows, 1, 0, shuffle=False) if job.right else shared(rows, job.world, job.rank, shuffle=False)
    batches = torch.utils.data.BatchSampler(inner, job.batch, drop_last=False)
    seen = train(job, [DataLoader(rows, batch_sampler=Prepared(batches))] * 3, updates=3 * ROWS // GLOBAL_BATCH)
    return len({*seen[0]})


@case("seed-times-rank", "NVlabs/LongLive#71", 48, 38)
def seed_times_rank(job: Job) -> object:
    """The seed of the distributed sampler depends on the rank, so that the ranks deal out different permutations: some
    rows are trained twice in an epoch, others never."""
    return len({*train(job, epochs(plain(job, seed=0 if job.right else 7 * (job.rank + 1))))[0]})


@case("shuffled-before-sampler", "QwenLM/Qwen3-VL#1971", 48, 37)
def shuffled_before_sampler(job: Job) -> object:
    """Each process shuffles the list of rows without a common seed before the distributed sampler indexes it: index i
    is another row on each rank."""
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(0 if job.right else job.rank)).tolist()
    return len({*train(job, epochs(plain(job, data(order))))[0]})


@case("noise-shared", "huggingface/diffusers train_text_to_image.py", 2, 1, found="finding")
def noise_shared(job: Job) -> object:
    """One seed is set on all ranks, so that all add the same noise at the same time steps to their own images."""
    torch.manual_seed(job.rank if job.right else 0)
    rows, noises = plain(job), list[float]()
    model = DistributedDataParallel(nn.Linear(4, 4))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    w = job.watch(model, opt)
    for batches in epochs(rows, 2):
        for inputs, _ in batches:
            w.batch(ids(inputs))
            w.expect("noise", torch.get_rng_state(), "differ")
            noise = torch.randn(inputs.shape)
            noises.append(float(noise[0, 0]))
            nn.functional.mse_loss(model(inputs + noise), noise).backward()
            opt.step()
            opt.zero_grad()
    w.close()
    every: list[float] = [0.0] * job.world
    dist.all_gather_object(every, noises[0])
    return len({*every})
