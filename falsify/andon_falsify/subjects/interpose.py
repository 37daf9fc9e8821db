"""What stands between a trainer and its task and backend, looks, and changes nothing (unless a poison is planted)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

import torch
from torch import nn

from andon.backend.base import Backend
from andon.step.micro_batch import Batch, LeafLoss, Task
from andon_falsify.subjects.masks import MaskRecorder
from andon_falsify.subjects.trace import LeafMasks

T = TypeVar("T")


class Place:
    """Which rank computes."""

    rank: int = 0


class WatchedBackend:
    """A backend whose work on a replica runs inside `around(rank)`; collectives are passed through."""

    def __init__(self, inner: Backend, place: Place, around: Callable[[int], AbstractContextManager[object]]) -> None:
        self.inner = inner
        self.name = inner.name
        self.world_size = inner.world_size
        self.ranks = inner.ranks
        self.devices = inner.devices
        self._place = place
        self._around = around

    def map(self, work: Callable[[int], T]) -> list[T]:
        """See `Backend.map`."""

        def watched(index: int) -> T:
            self._place.rank = rank = self.ranks[index]
            with self._around(rank):
                return work(index)

        return self.inner.map(watched)

    def gather(self, local: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """See `Backend.gather`."""
        return self.inner.gather(local)

    def exchange(self, local: Sequence[torch.Tensor], rows: Sequence[int]) -> list[list[torch.Tensor]]:
        """See `Backend.exchange`."""
        return self.inner.exchange(local, rows)

    def close(self) -> None:
        """See `Backend.close`."""
        self.inner.close()


class Loaded(dict[str, torch.Tensor]):
    """A batch that knows its rows."""

    ids: tuple[int, ...] = ()


class WatchedTask:
    """A task that says which rows each rank asked for and what masks each micro-batch drew.

    inner: the trainer's own task; a fault may put another in its place. on_leaf(rank, rows, masks) is called for each
    micro-batch. poisoned(rows) says which kind of poison a micro-batch gets, "" for none.
    """

    def __init__(
        self,
        inner: Task,
        place: Place,
        on_leaf: Callable[[int, tuple[int, ...], LeafMasks], None],
        poisoned: Callable[[tuple[int, ...]], str],
    ) -> None:
        self.inner = inner
        self._place = place
        self._on_leaf = on_leaf
        self._poisoned = poisoned
        self._recorders: dict[int, MaskRecorder] = {}

    def watch(self, model: nn.Module) -> None:
        """Record the masks of `model` from now on."""
        self._recorders[id(model)] = MaskRecorder(model)

    def load(self, ids: Sequence[int], device: torch.device) -> Batch:
        """See `Task.load`."""
        batch = Loaded(self.inner.load(ids, device))
        batch.ids = tuple(ids)
        return batch

    def loss_sum(self, model: nn.Module, batch: Batch) -> LeafLoss:
        """See `Task.loss_sum`."""
        recorder = self._recorders.get(id(model))
        ids = batch.ids if isinstance(batch, Loaded) else ()
        if recorder is None:
            loss, masks = self.inner.loss_sum(model, batch), {}
        else:
            with recorder.recording() as masks:
                loss = self.inner.loss_sum(model, batch)
        hidden = "" if recorder is None else recorder.hidden
        self._on_leaf(self._place.rank, ids, LeafMasks(batch["input_ids"].shape[1], dict(masks), hidden))
        return _poison(loss, self._poisoned(ids), model)

    def content(self, batch: Batch) -> torch.Tensor:
        """See `Task.content`."""
        return self.inner.content(batch)

    def planned_content(self, ids: Sequence[int]) -> torch.Tensor:
        """See `Task.planned_content`."""
        return self.inner.planned_content(ids)

    def planned_terms(self, ids: Sequence[int]) -> Sequence[int]:
        """See `Task.planned_terms`."""
        return self.inner.planned_terms(ids)


def _poison(loss: LeafLoss, kind: str, model: nn.Module) -> LeafLoss:
    if not kind:
        return loss
    if kind == "gradient":
        # The root of 0 is 0 and its slope infinite: a finite loss with a gradient of 0 * inf = NaN.
        weight = next(parameter for parameter in model.parameters() if parameter.requires_grad)
        return LeafLoss(loss.loss_sum + (0 * weight.sum()).sqrt(), loss.correct, loss.terms)
    return LeafLoss(loss.loss_sum * float(kind), loss.correct, loss.terms)
