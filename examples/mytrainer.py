"""A data-parallel loop as a subject of `andon falsify`: the reader's own, with two mistakes in it.

andon falsify --subject mytrainer:make
"""

from __future__ import annotations

import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, DistributedSampler

from andon_falsify import Case, Told, collate, dataset, model, optimizer


class MyTrainer:
    """SGD or AdamW over all ranks; gradients are averaged by hand."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.model = model(case)
        self.optimizer = optimizer(case, self.model.parameters())
        rows = dataset(case)
        self.sampler = DistributedSampler(rows, seed=case.seed)  # repeats rows where they do not divide evenly
        self.loader = DataLoader(rows, batch_size=case.local_batch, sampler=self.sampler, collate_fn=collate)

    def train(self, told: Told) -> None:
        """Train to the end of the case: its epochs, or its number of updates."""
        updates = 0
        for epoch in range(self.case.epochs):
            self.sampler.set_epoch(epoch)
            for number, batch in enumerate(self.loader, start=1):
                self.model(**batch).loss.backward()  # not divided by the accumulation
                if number % self.case.accumulation == 0 or number == len(self.loader):
                    self.update()
                    updates += 1
                    if updates == self.case.max_steps:
                        return

    def update(self) -> None:
        """One optimizer step with the mean over the ranks."""
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        if self.case.clip_norm is not None:
            clip_grad_norm_(self.model.parameters(), self.case.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()


def make(case: Case) -> MyTrainer:
    """Called on every rank, in a process group that is there already."""
    return MyTrainer(case)
