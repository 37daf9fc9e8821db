"""Lightning Fabric as its documentation teaches: `setup`, `no_backward_sync`, `clip_gradients`, the model's mean loss.

(https://lightning.ai/docs/fabric/stable/advanced/gradient_accumulation.html.)
"""

from __future__ import annotations

from typing import Any

from lightning.fabric import Fabric
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.fabric.strategies.ddp import DDPStrategy
from torch.utils.data import DataLoader, DistributedSampler

from andon_falsify.loops.protocol import Told
from andon_falsify.loops.task import as_launched, collate, dataset, model, optimizer, windows
from andon_falsify.subjects.case import Case


class FabricLoop:
    """See the module."""

    def __init__(self, case: Case) -> None:
        self.case = case
        as_launched()
        self.fabric = Fabric(
            accelerator="cpu",
            strategy=DDPStrategy(process_group_backend="gloo"),
            devices=case.world,
            plugins=[TorchElasticEnvironment()],
        )
        self.fabric.launch()
        plain = model(case)
        prepared: Any = self.fabric.setup(plain, optimizer(case, plain.parameters()))
        self.model, self.optimizer = prepared
        rows = dataset(case)
        self.sampler: DistributedSampler[int] = DistributedSampler(rows, shuffle=True, seed=case.seed)
        loader = DataLoader(rows, batch_size=case.local_batch, sampler=self.sampler, collate_fn=collate)
        self.loader: Any = self.fabric.setup_dataloaders(loader, use_distributed_sampler=False)

    def train(self, told: Told) -> None:
        """See `Loop.train`."""
        for update, window in enumerate(windows(self.case, self.sampler, self.loader), start=1):
            for place, batch in enumerate(window, start=1):
                with self.fabric.no_backward_sync(self.model, enabled=place < len(window)):
                    self.fabric.backward(self.model(**batch).loss / self.case.accumulation)
            if self.case.clip_norm is not None:
                self.fabric.clip_gradients(self.model, self.optimizer, max_norm=self.case.clip_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()
            if update == self.case.max_steps:
                return


def make(case: Case) -> FabricLoop:
    """The loop of one rank."""
    return FabricLoop(case)
