"""A Lightning module that returns the model's own loss, and `accumulate_grad_batches`.

(https://lightning.ai/docs/pytorch/stable/advanced/training_tricks.html)
"""

from __future__ import annotations

from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

from benchmarks.causal_peers.job import UPDATES, Layout, collator, features, optimizer


class _Module(lightning.LightningModule):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        return self.model(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer(self.model)


def train(model: Any, layout: Layout) -> None:
    """Three epochs of one update each."""
    loader = DataLoader(features(layout.trained), batch_size=layout.local(), shuffle=True, collate_fn=collator())
    lightning.Trainer(
        accelerator="cpu",
        devices=layout.world,
        strategy=DDPStrategy(process_group_backend="gloo") if layout.world > 1 else "auto",
        accumulate_grad_batches=layout.accumulation,
        max_epochs=UPDATES,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(_Module(model), loader)
    model.train()
