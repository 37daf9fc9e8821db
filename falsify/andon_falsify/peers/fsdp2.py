"""FSDP2 as its tutorial teaches: `fully_shard` on each layer and on the whole, the mean loss over the accumulation.

(https://docs.pytorch.org/tutorials/intermediate/FSDP_tutorial.html.) FSDP averages over the ranks.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from andon_falsify.loops.task import model
from andon_falsify.peers.ddp import TutorialLoop
from andon_falsify.subjects.case import Case


class Fsdp2Loop(TutorialLoop):
    def __init__(self, case: Case) -> None:
        whole: Any = model(case)
        mesh = init_device_mesh("cpu", (case.world,))
        base = whole.get_base_model() if case.rank else whole
        for layer in base.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(whole, mesh=mesh)
        super().__init__(case, whole)

    def backward(self, batch: Any, *, synchronize: bool) -> None:
        sharded: Any = self.model
        sharded.set_requires_gradient_sync(synchronize)
        super().backward(batch, synchronize=synchronize)
