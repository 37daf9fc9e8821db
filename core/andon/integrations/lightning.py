"""`andon.watch` for the `Trainer` of Lightning.

Trainer(callbacks=[WatchCallback(action="raise", ids=lambda batch: batch["ids"])], ...)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from andon_contracts.watch import Watch, watch


class WatchCallback(Callback):  # type: ignore[misc, unused-ignore]
    """Watches every update of `Trainer.fit`. `watch` is the open watch; None before and after training."""

    def __init__(self, *, ids: Callable[[Any], Sequence[int] | torch.Tensor] | None = None, **options: Any) -> None:
        """ids: returns the row ids of a batch. options: passed to `andon.watch`."""
        self.watch: Watch | None = None
        self._ids = ids
        self._options = options

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open the watch on every rank. Its `start` is `trainer.global_step`, the number of earlier updates."""
        start = {"start": trainer.global_step} if trainer.global_step else {}
        model = trainer.strategy.model or pl_module
        self.watch = watch(model, trainer.optimizers, **{**start, **self._options})

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self.watch is not None and self._ids is not None:
            self.watch.batch(self._ids(batch))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.watch is not None:
            self.watch.close()
            self.watch = None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self.watch is not None:
            self.watch.__exit__(type(exception), exception, exception.__traceback__)
            self.watch = None
