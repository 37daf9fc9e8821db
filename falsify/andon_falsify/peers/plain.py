"""A correct data-parallel loop written by hand: sums of losses over the rows of the global batch.

Every rank computes its part of each global batch in micro-batches and divides each sum by the rows of the WHOLE batch.
Gradients, losses and evaluation scores are summed over the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

from andon_falsify.loops.protocol import Told
from andon_falsify.loops.task import collate, dataset, model, optimizer
from andon_falsify.subjects.case import Case


class PlainLoop:
    """halts: an update that is not finite raises `FloatingPointError` on every rank."""

    halts = True

    def __init__(self, case: Case) -> None:
        self.case = case
        self.model = model(case)
        self.optimizer = optimizer(case, self.model.parameters())
        self.rows = dataset(case)
        self.device = next(self.model.parameters()).device
        self.trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.weights = None if case.class_weights is None else torch.tensor(case.class_weights, device=self.device)
        self.done = 0

    def train(self, told: Told) -> None:
        for update, batch in enumerate(self._batches(), start=1):
            if update > self.done:
                told.loss(self._update(batch))
                self.done = update

    def _update(self, batch: list[int]) -> Tensor:
        total = torch.zeros((), device=self.device)
        for piece in cut(self._mine(batch), self.case.local_batch):
            loss = self._loss_sum(piece) / len(batch)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        self._add_over_ranks(total)
        self._apply()
        return total

    def _mine(self, batch: list[int]) -> list[int]:
        return batch[dist.get_rank() :: dist.get_world_size()]

    def _batches(self) -> Iterator[list[int]]:
        batches = []
        for epoch in range(self.case.epochs):
            order = torch.randperm(len(self.rows), generator=torch.Generator().manual_seed(self.case.seed + epoch))
            batches += cut(order.tolist(), self.case.global_batch)
        yield from batches[: self.case.max_steps]

    def _collated(self, ids: Sequence[int]) -> dict[str, Tensor]:
        return {name: each.to(self.device) for name, each in collate([self.rows[row] for row in ids]).items()}

    def _loss_sum(self, ids: Sequence[int]) -> Tensor:
        batch = self._collated(ids)
        labels = batch.pop("labels")
        return cross_entropy(self.model(**batch).logits, labels, self.weights, reduction="sum")

    def _add_over_ranks(self, total: Tensor) -> None:
        for parameter in self.trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
        dist.all_reduce(total)

    def _apply(self) -> None:
        if not all(bool(parameter.grad.isfinite().all()) for parameter in self.trained if parameter.grad is not None):
            raise FloatingPointError("the gradient is not finite")
        if self.case.clip_norm is not None:
            clip_grad_norm_(self.trained, self.case.clip_norm)
        self._step()

    def _step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def evaluate(self) -> Mapping[str, float]:
        sums = self._scores(self._mine(list(range(len(self.rows)))))
        dist.all_reduce(sums)
        loss, accuracy = (sums / len(self.rows)).tolist()
        return {"loss": loss, "accuracy": accuracy}

    @torch.no_grad()
    def _scores(self, ids: list[int]) -> Tensor:
        """float64 [2]: the sum of the losses of these rows, and the number of correct predictions."""
        self.model.eval()
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        for piece in cut(ids, 8):
            batch = self._collated(piece)
            labels = batch.pop("labels")
            logits = self.model(**batch).logits
            sums[0] += cross_entropy(logits, labels, self.weights, reduction="sum")
            sums[1] += (logits.argmax(-1) == labels).sum()
        self.model.train()
        return sums

    def save(self, folder: Path) -> None:
        """Each rank writes its random state; rank 0 also writes what is equal on all ranks."""
        torch.save(torch.get_rng_state(), folder / f"random-{dist.get_rank()}.pt")
        if dist.get_rank() == 0:
            state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "done": self.done}
            torch.save(state, folder / "state.pt")

    def load(self, folder: Path) -> None:
        state = torch.load(folder / "state.pt", weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.done = state["done"]
        torch.set_rng_state(torch.load(folder / f"random-{dist.get_rank()}.pt", weights_only=True))


def cut(rows: list[int], size: int) -> list[list[int]]:
    """Split `rows` into lists of `size`; the last one may be shorter."""
    return [rows[start : start + size] for start in range(0, len(rows), size)]
