"""DistributedDataParallel and FSDP2 as their tutorials teach: micro-batch means, divided by the accumulation.

`DistributedSampler` splits the rows, and both average over the ranks.
(https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html, FSDP_tutorial.html, and the notes of `no_sync`.)
"""

from __future__ import annotations

from contextlib import nullcontext
from itertools import islice
from typing import Any

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, DistributedSampler

from andon_falsify.loops.protocol import Told
from andon_falsify.loops.task import collate, dataset, model, optimizer
from andon_falsify.subjects.case import Case


class TutorialLoop:
    """The loop of the tutorials, for any wrapper of the model: accumulate, clip, step.

    The last window of an epoch has the micro-batches that are left.
    """

    def __init__(self, case: Case, wrapped: nn.Module) -> None:
        self.case = case
        self.model = wrapped
        self.optimizer = optimizer(case, self.model.parameters())
        rows = dataset(case)
        self.sampler: DistributedSampler[int] = DistributedSampler(rows, shuffle=True, seed=case.seed)
        self.loader: Any = DataLoader(rows, batch_size=case.local_batch, sampler=self.sampler, collate_fn=collate)

    def train(self, told: Told) -> None:
        made = 0
        for epoch in range(self.case.epochs):
            self.sampler.set_epoch(epoch)
            batches = iter(self.loader)
            while window := list(islice(batches, self.case.accumulation)):
                for place, batch in enumerate(window, start=1):
                    self.backward(batch, synchronize=place == len(window))
                if self.case.clip_norm is not None:
                    self.clip(self.case.clip_norm)
                self.optimizer.step()
                self.optimizer.zero_grad()
                made += 1
                if made == self.case.max_steps:
                    return

    def backward(self, batch: Any, *, synchronize: bool) -> None:
        loss = self.model(**batch).loss / self.case.accumulation
        loss.backward()

    def clip(self, norm: float) -> None:
        clip_grad_norm_(self.model.parameters(), norm)


class DdpLoop(TutorialLoop):
    def __init__(self, case: Case) -> None:
        plain = model(case)  # DDP moves batches to the device of `device_ids`
        ids = [next(plain.parameters()).device] if case.backend == "nccl" else None
        super().__init__(case, DistributedDataParallel(plain, device_ids=ids))

    def backward(self, batch: Any, *, synchronize: bool) -> None:
        wrapped: Any = self.model
        with nullcontext() if synchronize else wrapped.no_sync():
            super().backward(batch, synchronize=synchronize)


class Fsdp2Loop(TutorialLoop):
    """`fully_shard` on each layer and on the whole."""

    def __init__(self, case: Case) -> None:
        whole: Any = model(case)
        mesh = init_device_mesh("cuda" if case.backend == "nccl" else "cpu", (case.world,))
        base = whole.get_base_model() if case.rank else whole
        for layer in base.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(whole, mesh=mesh)
        super().__init__(case, whole)

    def backward(self, batch: Any, *, synchronize: bool) -> None:
        sharded: Any = self.model
        sharded.set_requires_gradient_sync(synchronize)
        super().backward(batch, synchronize=synchronize)
