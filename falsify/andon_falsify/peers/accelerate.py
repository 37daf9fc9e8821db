"""Accelerate as its documentation teaches: `prepare`, `accumulate`, `clip_grad_norm_`, and the model's own mean loss.

(https://huggingface.co/docs/accelerate/usage_guides/gradient_accumulation.) `even_batches`, a default, fills the last
batches of an epoch with rows that were visited already.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch.utils.data import DataLoader

from andon_falsify.loops.protocol import Told
from andon_falsify.loops.task import as_launched, collate, dataset, model, optimizer
from andon_falsify.subjects.case import Case


def accelerator_for(case: Case, **settings: Any) -> Accelerator:
    """A new accelerator on CPUs. Its state outlives it, and one process runs one case after the other."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    as_launched()
    return Accelerator(cpu=True, gradient_accumulation_steps=case.accumulation, **settings)


class AccelerateLoop:
    def __init__(self, case: Case) -> None:
        self.case = case
        self.accelerator = accelerator_for(case)
        plain = model(case)
        order = torch.Generator().manual_seed(case.seed)
        loader = DataLoader(
            dataset(case), batch_size=case.local_batch, shuffle=True, generator=order, collate_fn=collate
        )
        prepared: Any = self.accelerator.prepare(plain, optimizer(case, plain.parameters()), loader)
        self.model, self.optimizer, self.loader = prepared

    def train(self, told: Told) -> None:
        made = 0
        for _ in range(self.case.epochs):
            for batch in self.loader:
                with self.accelerator.accumulate(self.model):
                    loss = self.model(**batch).loss
                    self.accelerator.backward(loss)
                    if self.accelerator.sync_gradients and self.case.clip_norm is not None:
                        self.accelerator.clip_grad_norm_(self.model.parameters(), self.case.clip_norm)
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                made += self.accelerator.sync_gradients
                if made == self.case.max_steps:
                    return
