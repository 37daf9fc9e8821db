"""DistributedDataParallel as its tutorial teaches: the mean loss of each micro-batch, over the accumulation.

`DistributedSampler` deals the rows, `no_sync` spares the reductions within an update, and the average over the ranks
is DDP's own. (https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html, and the notes of `no_sync`.)
"""

from __future__ import annotations

from contextlib import nullcontext

from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, DistributedSampler

from andon_falsify.loops.protocol import Told
from andon_falsify.loops.task import collate, dataset, model, optimizer, windows
from andon_falsify.subjects.case import Case


class DdpLoop:
    """See the module."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.model = DistributedDataParallel(model(case))
        self.optimizer = optimizer(case, self.model.parameters())
        rows = dataset(case)
        self.sampler: DistributedSampler[int] = DistributedSampler(rows, shuffle=True, seed=case.seed)
        self.loader = DataLoader(rows, batch_size=case.local_batch, sampler=self.sampler, collate_fn=collate)

    def train(self, told: Told) -> None:
        """See `Loop.train`."""
        for update, window in enumerate(windows(self.case, self.sampler, self.loader), start=1):
            for place, batch in enumerate(window, start=1):
                with nullcontext() if place == len(window) else self.model.no_sync():
                    loss = self.model(**batch).loss / self.case.accumulation
                    loss.backward()
            if self.case.clip_norm is not None:
                clip_grad_norm_(self.model.parameters(), self.case.clip_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()
            if update == self.case.max_steps:
                return


def make(case: Case) -> DdpLoop:
    """The loop of one rank."""
    return DdpLoop(case)
