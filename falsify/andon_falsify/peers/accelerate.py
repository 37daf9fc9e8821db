"""Accelerate as its documentation teaches, and with its documented fix for batches of unequal size.

(https://huggingface.co/docs/accelerate/usage_guides/gradient_accumulation; the sums are in its section "on training
samples of variable size".)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from itertools import islice
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, Sampler

from andon_falsify.loops.observer import IGNORED_LABEL
from andon_falsify.loops.protocol import Told
from andon_falsify.loops.task import collate, dataset, model, optimizer
from andon_falsify.peers.plain import PlainLoop
from andon_falsify.subjects.case import Case


def accelerator_for(case: Case, **settings: Any) -> Accelerator:
    """A new accelerator. Its state outlives it, and one process runs one case after the other."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return Accelerator(cpu=case.backend != "nccl", gradient_accumulation_steps=case.accumulation, **settings)


class AccelerateLoop:
    """`prepare`, `accumulate`, `clip_grad_norm_`, and the model's own mean loss.

    `even_batches`, a default, fills the last batches of an epoch with rows that were visited already.
    """

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


class FilledRows(Dataset[Any]):
    """The rows of a case; an index after the last row gives the first row without a label."""

    def __init__(self, case: Case) -> None:
        self._rows = dataset(case)

    def __getitem__(self, index: int) -> Any:
        return self._rows[index] if index < len(self._rows) else {**self._rows[0], "labels": IGNORED_LABEL}

    def __len__(self) -> int:
        return len(self._rows)


class FilledOrder(Sampler[int]):
    """The shuffled rows of an epoch, the same on every rank, then indices after the last row up to whole batches."""

    def __init__(self, rows: int, whole: int, seed: int) -> None:
        self.epoch = 0
        self._rows = rows
        self._filled = rows + -rows % whole
        self._seed = seed

    def __iter__(self) -> Iterator[int]:
        drawn = torch.Generator().manual_seed(self._seed + self.epoch)
        yield from torch.randperm(self._rows, generator=drawn).tolist()
        yield from range(self._rows, self._filled)

    def __len__(self) -> int:
        return self._filled


class RightAccelerateLoop(PlainLoop):
    """Losses are summed and divided by the rows of the whole update, gathered over the ranks; no row is visited twice.

    DDP's average over the ranks and Accelerate's over the micro-batches are multiplied out. An epoch is filled with
    rows without a label, which have no loss and are not counted, so that every rank has equally many micro-batches.
    """

    halts = False

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.accelerator = accelerator_for(case, dataloader_config=DataLoaderConfiguration(even_batches=False))
        self.order = FilledOrder(len(case.rows), case.local_batch * case.world, case.seed)
        loader = DataLoader(FilledRows(case), batch_size=case.local_batch, sampler=self.order, collate_fn=collate)
        prepared: Any = self.accelerator.prepare(self.model, self.optimizer, loader)
        self.model, self.optimizer, self.loader = prepared

    def train(self, told: Told) -> None:
        made = 0
        for epoch in range(self.case.epochs):
            self.order.epoch = epoch
            batches = iter(self.loader)
            while window := list(islice(batches, self.case.accumulation)):
                made += 1
                if made > self.done:
                    told.loss(self._update_with(window))
                    self.done = made
                if made == self.case.max_steps:
                    return

    def _update_with(self, window: list[dict[str, Tensor]]) -> Tensor:
        count = torch.stack([(batch["labels"] != IGNORED_LABEL).sum() for batch in window]).sum()
        rows = self.accelerator.reduce(count, reduction="sum")
        averaged = self.case.accumulation * self.accelerator.num_processes
        total = torch.zeros((), device=self.device)
        for place, batch in enumerate(window, start=1):
            with nullcontext() if place == len(window) else self.accelerator.no_sync(self.model):
                # The model receives the labels too: they tell rows that are trained on from those that fill the epoch.
                loss = cross_entropy(self.model(**batch).logits, batch["labels"], reduction="sum") / rows
                self.accelerator.backward(loss * averaged)
            total += loss.detach()
        if self.case.clip_norm is not None:
            self.accelerator.clip_grad_norm_(self.model.parameters(), self.case.clip_norm)
        self._step()
        mean: Tensor = self.accelerator.reduce(total, reduction="sum")
        return mean
