"""DistributedDataParallel, watched by one line: torchrun --nproc-per-node 2 examples/watch/ddp.py"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import andon


class Rows(Dataset):
    """64 rows that know their number."""

    def __init__(self) -> None:
        self.x = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
        self.y = (self.x.sum(1) > 0).long()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        return index, self.x[index], self.y[index]


def main() -> None:
    """Two epochs."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    rows = Rows()
    sampler = DistributedSampler(rows, shuffle=True)
    loader = DataLoader(rows, batch_size=8, sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    w = andon.watch(model, optimizer, rows=len(rows))  # the one line
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for ids, x, y in loader:
            w.batch(ids)  # optional: who trains on what
            loss = nn.functional.cross_entropy(model(x), y)
            w.loss(loss.detach() * len(ids), len(ids))  # optional: what the ledger says of the loss
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    w.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
