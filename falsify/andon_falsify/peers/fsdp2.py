"""FSDP2 as its tutorial teaches: `fully_shard` on each layer and on the whole, the mean loss over the accumulation.

(https://docs.pytorch.org/tutorials/intermediate/FSDP_tutorial.html.) The average over the ranks is FSDP's own.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, DistributedSampler

from andon_falsify.loops.protocol import Told
from andon_falsify.loops.task import collate, dataset, model, optimizer, windows
from andon_falsify.subjects.case import Case


class Fsdp2Loop:
    """See the module."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.model = model(case)
        mesh = init_device_mesh("cpu", (case.world,))
        whole: Any = self.model
        base = whole.get_base_model() if case.rank else whole
        for layer in base.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = optimizer(case, self.model.parameters())
        rows = dataset(case)
        self.sampler: DistributedSampler[int] = DistributedSampler(rows, shuffle=True, seed=case.seed)
        self.loader = DataLoader(rows, batch_size=case.local_batch, sampler=self.sampler, collate_fn=collate)

    def train(self, told: Told) -> None:
        """See `Loop.train`."""
        sharded: Any = self.model
        for update, window in enumerate(windows(self.case, self.sampler, self.loader), start=1):
            for place, batch in enumerate(window, start=1):
                sharded.set_requires_gradient_sync(place == len(window))
                loss = self.model(**batch).loss / self.case.accumulation
                loss.backward()
            if self.case.clip_norm is not None:
                clip_grad_norm_(self.model.parameters(), self.case.clip_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()
            if update == self.case.max_steps:
                return


def make(case: Case) -> Fsdp2Loop:
    """The loop of one rank."""
    return Fsdp2Loop(case)
