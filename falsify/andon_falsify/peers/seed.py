"""The algorithm of the coordinator that Andon re-creates, written from its description.

Every worker trains on its own contiguous shard, the last with the remainder, and makes its own optimizer step; then all
copy the weights of worker 0. The updates of the other workers are lost, and the states of their optimizers diverge. The
reported loss is the mean over all rows.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_

from andon_falsify.loops.protocol import Told
from andon_falsify.loops.task import collate, dataset, model, optimizer
from andon_falsify.subjects.case import Case


class SeedLoop:
    def __init__(self, case: Case) -> None:
        self.case = case
        self.model = model(case)
        self.optimizer = optimizer(case, self.model.parameters())
        self.rows = dataset(case)

    def train(self, told: Told) -> None:
        made = 0
        for _ in range(self.case.epochs):
            for start in range(0, len(self.rows), self.case.batch_size):
                told.loss(self._update(list(range(start, min(start + self.case.batch_size, len(self.rows))))))
                made += 1
                if made == self.case.max_steps:
                    return

    def _update(self, batch: list[int]) -> float:
        rank, world = dist.get_rank(), dist.get_world_size()
        size = len(batch) // world
        mine = batch[rank * size : (rank + 1) * size if rank < world - 1 else len(batch)]
        total = torch.zeros(())
        if mine:
            loss = self.model(**collate([self.rows[row] for row in mine])).loss
            loss.backward()
            total += loss.detach() * len(mine)
        if self.case.clip_norm is not None:
            clip_grad_norm_(self.model.parameters(), self.case.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                dist.broadcast(parameter.detach(), 0)
        dist.all_reduce(total)
        return float(total) / len(batch)
