"""Lightning Fabric, watched by one line: torchrun --nproc-per-node 2 examples/watch/fabric_loop.py"""

from __future__ import annotations

import os

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import andon


def main() -> None:
    """Two epochs."""
    fabric = Fabric(accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]), strategy="ddp")
    fabric.launch()
    torch.manual_seed(0)
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    rows = TensorDataset(torch.arange(64), x, (x.sum(1) > 0).long())
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    loader = fabric.setup_dataloaders(DataLoader(rows, batch_size=8, shuffle=True))

    w = andon.watch(model, optimizer, rows=len(rows))  # the one line, after setup
    for _ in range(2):
        for ids, features, labels in loader:
            w.batch(ids)  # optional: who trains on what
            fabric.backward(nn.functional.cross_entropy(model(features), labels))
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
    w.close()


if __name__ == "__main__":
    main()
