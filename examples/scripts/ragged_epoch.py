"""DDP over a data set that does not divide evenly. The mistake: every rank takes the mean over its own rows.

The last batch has 5 rows, so that ranks have different numbers of them, and DDP averages the ranks' means as if they
had the same. Mended, each rank's sum is divided by the rows of all. Saves and resumes.

    torchrun --nproc-per-node 2 ragged_epoch.py --batch 6 --folder runs/x [--mended] [--resume]
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import andon


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--mended", action="store_true")
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    inputs, labels = torch.randn(29, 6), torch.randint(0, 3, (29,))
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    done = restore(options.folder, model, optimizer) if options.resume else 0
    watch = andon.watch(model, optimizer, start=done)
    batches = [
        order[start : start + options.batch * world]
        for epoch in range(4)
        for order in [torch.randperm(len(inputs), generator=torch.Generator().manual_seed(epoch)).tolist()]
        for start in range(0, len(order), options.batch * world)
    ]
    for number, batch in enumerate(batches[done:], start=done + 1):
        mine = batch[rank::world]
        watch.batch(mine)
        losses = nn.functional.cross_entropy(model(inputs[mine]), labels[mine], reduction="sum")
        loss = losses * world / len(batch) if options.mended else losses / len(mine)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        save(options.folder, number, model, optimizer)
    watch.close()
    dist.destroy_process_group()


def save(folder: Path, done: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Rank 0 writes the state whole or not at all; the others wait, so that nobody is ahead of the checkpoint."""
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        state = {"done": done, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, folder / "state.new")
        os.replace(folder / "state.new", folder / "state.pt")
    dist.barrier()


def restore(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Take up the last state; the number of updates it has seen."""
    state = torch.load(folder / "state.pt", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["done"])


if __name__ == "__main__":
    main()
