"""Lightning Fabric as its documentation teaches: `setup`, `no_backward_sync`, `clip_gradients`, the model's mean loss.

(https://lightning.ai/docs/fabric/stable/advanced/gradient_accumulation.html.)
"""

from __future__ import annotations

from typing import Any

from lightning.fabric import Fabric
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.fabric.strategies.ddp import DDPStrategy

from andon_falsify.loops.task import model
from andon_falsify.peers.ddp import TutorialLoop
from andon_falsify.subjects.case import Case


class FabricLoop(TutorialLoop):
    def __init__(self, case: Case) -> None:
        self.fabric: Any = Fabric(
            accelerator="cpu",
            strategy=DDPStrategy(process_group_backend="gloo"),
            devices=case.world,
            plugins=[TorchElasticEnvironment()],
        )
        self.fabric.launch()
        super().__init__(case, model(case))
        self.model, self.optimizer = self.fabric.setup(self.model, self.optimizer)
        self.loader = self.fabric.setup_dataloaders(self.loader, use_distributed_sampler=False)

    def backward(self, batch: Any, *, synchronize: bool) -> None:
        with self.fabric.no_backward_sync(self.model, enabled=not synchronize):
            self.fabric.backward(self.model(**batch).loss / self.case.accumulation)

    def clip(self, norm: float) -> None:
        self.fabric.clip_gradients(self.model, self.optimizer, max_norm=norm)
