"""Accelerate, watched by one line: torchrun --nproc-per-node 2 examples/watch/accelerate_loop.py

Also: accelerate launch --num_processes 2 examples/watch/accelerate_loop.py
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import andon


def main() -> None:
    """Four epochs, with accumulation over two micro-batches."""
    # Without cpu=True, Accelerate on machines without a GPU lets every rank of torchrun train alone.
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
    torch.manual_seed(0)
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    rows = TensorDataset(torch.arange(64), x, (x.sum(1) > 0).long())
    loader = DataLoader(rows, batch_size=8, shuffle=True)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    w = andon.watch(model, optimizer, rows=len(rows))  # the one line, after prepare
    for _ in range(4):
        for ids, features, labels in loader:
            with accelerator.accumulate(model):
                w.batch(ids)  # optional: who trains on what
                accelerator.backward(nn.functional.cross_entropy(model(features), labels))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    w.close()
    accelerator.end_training()


if __name__ == "__main__":
    main()
