"""Accelerate with the sums that its documentation gives for rows of unequal number, and no row visited twice.

(https://huggingface.co/docs/accelerate/usage_guides/gradient_accumulation, "on training samples of variable size".)
Losses are summed and divided by the rows of the whole update, gathered over the ranks; DDP's average over them, and
Accelerate's over the micro-batches, are multiplied out. An epoch is filled up with rows without a label, which have no
loss and are not counted, so that every rank has equally many micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, Sampler

from andon_falsify.loops.forward_passes import IGNORED_LABEL
from andon_falsify.loops.protocol import Told
from andon_falsify.loops.task import as_launched, collate, dataset, model, optimizer
from andon_falsify.subjects.case import Case

Batch = dict[str, Tensor]


class FilledRows(Dataset[Any]):
    """The rows of a case; a place behind the last is the first row without a label."""

    def __init__(self, case: Case) -> None:
        self._rows = dataset(case)

    def __getitem__(self, place: int) -> Any:
        return self._rows[place] if place < len(self._rows) else {**self._rows[0], "labels": IGNORED_LABEL}

    def __len__(self) -> int:
        return len(self._rows)


class FilledOrder(Sampler[int]):
    """The rows of an epoch in its order, the same on every rank, then places behind the last up to whole batches."""

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


class RightAccelerateLoop:
    """See the module."""

    def __init__(self, case: Case) -> None:
        self.case = case
        # Its state outlives an Accelerator, and this process serves one case after the other.
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        as_launched()
        self.accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_steps=case.accumulation,
            dataloader_config=DataLoaderConfiguration(even_batches=False),
        )
        plain = model(case)
        self.order = FilledOrder(len(case.rows), case.local_batch * case.world, case.seed)
        loader = DataLoader(FilledRows(case), batch_size=case.local_batch, sampler=self.order, collate_fn=collate)
        prepared: Any = self.accelerator.prepare(plain, optimizer(case, plain.parameters()), loader)
        self.model, self.optimizer, self.loader = prepared
        self.done = 0

    def train(self, told: Told) -> None:
        """See `Loop.train`."""
        made = 0
        for epoch in range(self.case.epochs):
            self.order.epoch = epoch
            batches = iter(self.loader)
            while window := list(islice(batches, self.case.accumulation)):
                made += 1
                if made > self.done:
                    told.loss(self._update(window))
                    self.done = made
                if made == self.case.max_steps:
                    return

    def _update(self, window: list[Batch]) -> Tensor:
        """One update with this rank's micro-batches; the mean loss of the rows of all ranks."""
        count = torch.stack([(batch["labels"] != IGNORED_LABEL).sum() for batch in window]).sum()
        rows = self.accelerator.reduce(count, reduction="sum")
        averaged = self.case.accumulation * self.accelerator.num_processes
        total = torch.zeros(())
        for place, batch in enumerate(window, start=1):
            with nullcontext() if place == len(window) else self.accelerator.no_sync(self.model):
                loss = self._loss_sum(batch) / rows
                self.accelerator.backward(loss * averaged)
            total += loss.detach()
        if self.case.clip_norm is not None:
            self.accelerator.clip_grad_norm_(self.model.parameters(), self.case.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        mean: Tensor = self.accelerator.reduce(total, reduction="sum")
        return mean

    def _loss_sum(self, batch: Batch) -> Tensor:
        # The model is given the labels too, by which rows without one can be told from rows that are trained on.
        return cross_entropy(self.model(**batch).logits, batch["labels"], reduction="sum")

    @torch.no_grad()
    def evaluate(self) -> Mapping[str, float]:
        """See `Evaluates.evaluate`."""
        self.model.eval()
        rows, sums = dataset(self.case), torch.zeros(2, dtype=torch.float64)
        for row in range(self.accelerator.process_index, len(rows), self.accelerator.num_processes):
            batch = collate([rows[row]])
            logits = self.model(**batch).logits
            sums[0] += cross_entropy(logits, batch["labels"], reduction="sum")
            sums[1] += (logits.argmax(-1) == batch["labels"]).sum()
        self.model.train()
        loss, accuracy = (self.accelerator.reduce(sums, reduction="sum") / len(rows)).tolist()
        return {"loss": loss, "accuracy": accuracy}

    def save(self, folder: Path) -> None:
        """See `Restores.save`."""
        torch.save(torch.get_rng_state(), folder / f"random-{self.accelerator.process_index}.pt")
        if self.accelerator.is_main_process:
            weights = self.accelerator.unwrap_model(self.model).state_dict()
            state = {"model": weights, "optimizer": self.optimizer.state_dict(), "done": self.done}
            torch.save(state, folder / "state.pt")

    def load(self, folder: Path) -> None:
        """See `Restores.load`."""
        state = torch.load(folder / "state.pt", weights_only=True)
        self.accelerator.unwrap_model(self.model).load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.done = state["done"]
        random = torch.load(folder / f"random-{self.accelerator.process_index}.pt", weights_only=True)
        torch.set_rng_state(random)


def make(case: Case) -> RightAccelerateLoop:
    """The loop of one rank."""
    return RightAccelerateLoop(case)
