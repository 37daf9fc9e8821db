"""The Trainer of Lightning, watched by a callback: torchrun --nproc-per-node 2 examples/watch/lightning_callback.py"""

from __future__ import annotations

import os
import tempfile

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from andon.integrations.lightning import WatchCallback


class Classifier(LightningModule):
    """A small network with its optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """The mean loss of a batch of (ids, features, labels)."""
        _, features, labels = batch
        return nn.functional.cross_entropy(self.net(features), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    """Two epochs."""
    torch.manual_seed(0)
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    rows = TensorDataset(torch.arange(64), x, (x.sum(1) > 0).long())
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            max_epochs=2,
            accelerator="cpu",
            devices=int(os.environ["LOCAL_WORLD_SIZE"]),
            strategy="ddp",
            gradient_clip_val=1.0,
            callbacks=[WatchCallback(rows=len(rows), ids=lambda batch: batch[0])],  # the one line
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Classifier(), DataLoader(rows, batch_size=8, shuffle=True))


if __name__ == "__main__":
    main()
