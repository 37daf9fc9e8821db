"""DDP that makes no mistake, and whose layouts are not alike: nothing can be compared until it is mended.

torchrun --nproc-per-node 2 unlike.py --batch 6 --kind unseeded|by-rank|accelerate [--mended]

unseeded: every run begins with other weights. by-rank: each rank draws rows with a seed of its own, as nanoGPT does.
accelerate: its usual sampler shuffles in another order on one rank than on several.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

_UPDATES = 3


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--kind", choices=("unseeded", "by-rank", "accelerate"), required=True)
    parser.add_argument("--mended", action="store_true")
    options = parser.parse_args()
    everything = torch.Generator().manual_seed(0)
    rows = TensorDataset(torch.randn(48, 6, generator=everything), torch.randint(0, 3, (48,), generator=everything))
    if options.mended or options.kind != "unseeded":
        torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    if options.kind == "accelerate":
        _with_accelerate(plain, rows, options.batch, mended=options.mended)
        return
    dist.init_process_group("gloo")
    by_rank = options.kind == "by-rank" and not options.mended
    model = DistributedDataParallel(plain)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, labels in _batches(rows, options.batch, by_rank=by_rank):
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


def _batches(rows: TensorDataset, size: int, *, by_rank: bool) -> Iterator[tuple[Tensor, ...]]:
    """A rank's part of every update: rows of its own draw, or its share of a draw that all ranks make alike."""
    rank, world = dist.get_rank(), dist.get_world_size()
    drawn = torch.Generator().manual_seed(1337 + rank if by_rank else 1337)
    for _ in range(_UPDATES):
        if by_rank:
            yield rows[torch.randint(len(rows), (size,), generator=drawn)]
        else:
            yield rows[torch.randperm(len(rows), generator=drawn)[: size * world][rank::world]]


def _with_accelerate(plain: nn.Module, rows: TensorDataset, size: int, *, mended: bool) -> None:
    """The same by Accelerate, with its usual sampler, or with the one that has a seed of its own."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=mended))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    loader = DataLoader(rows, batch_size=size, shuffle=True)
    model, optimizer, loader = accelerator.prepare(plain, optimizer, loader)
    for inputs, labels in loader:
        accelerator.backward(nn.functional.cross_entropy(model(inputs), labels))
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()


if __name__ == "__main__":
    main()
