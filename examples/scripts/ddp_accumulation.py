"""DDP with gradient accumulation as tutorials show it. The mistake: the loss is not divided by the accumulation.

torchrun --nproc-per-node 2 ddp_accumulation.py --batch 3 --accumulate 2 [--mended]
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--accumulate", type=int, required=True)
    parser.add_argument("--mended", action="store_true")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    rows = TensorDataset(torch.randn(48, 6), torch.randint(0, 3, (48,)))
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sampler = DistributedSampler(rows)
    loader = DataLoader(rows, batch_size=options.batch, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for number, (inputs, labels) in enumerate(loader, start=1):
            loss = nn.functional.cross_entropy(model(inputs), labels)
            if options.mended:
                loss = loss / options.accumulate
            loss.backward()
            if number % options.accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
