"""Gradients averaged by hand, as in the first tutorials of torch.distributed. The mistake: summed, and not divided.

torchrun --nproc-per-node 2 all_reduce_by_hand.py --batch 6 [--mended]
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn

import andon


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--mended", action="store_true")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    inputs, labels = torch.randn(36, 6), torch.randint(0, 3, (36,))
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    watch = andon.watch(model, optimizer)
    for start in range(0, len(inputs), options.batch * world):
        mine = range(start + rank, start + options.batch * world, world)
        watch.batch(list(mine))
        loss = nn.functional.cross_entropy(model(inputs[mine]), labels[mine])
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            if options.mended:
                parameter.grad /= world
        optimizer.step()
        optimizer.zero_grad()
    watch.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
