"""Right loops that tell their rows, and do with them what is right and unusual: left out, resumed, scored by all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import andon
from tests.watch.clean import Seen, ignore, seen_by
from tests.watch.clean_loops import momentum
from tests.watch.loop import BATCH, PER_EPOCH, ROWS, Model, data, plan


def _as_they_are(ids: list[int]) -> Any:
    return ids


def as_array(ids: list[int]) -> Any:
    return np.array(ids, dtype=np.int64)


def as_scalars(ids: list[int]) -> Any:
    return [np.int32(row) if row % 2 else torch.tensor(row) for row in ids]


@dataclass(frozen=True)
class Told:
    """A loop over 37 rows in batches of 8 that tells its rows.

    start: the updates done before. skips: whether a batch of these rows is left out on all ranks. plan and rows:
    whether the watch is told them. scored: whether every rank evaluates all rows for itself.
    """

    form: Callable[[list[int]], Any] = _as_they_are
    start: int = 0
    skips: Callable[[int], bool] = lambda _: False
    plan: bool = False
    scored: bool = False

    def __call__(self, steps: int) -> Seen:
        torch.manual_seed(0)
        inner = Model()
        model = DistributedDataParallel(inner)
        optimizer = momentum([p for p in inner.parameters() if p.requires_grad])
        told = {"plan": plan} if self.plan else {}
        w = andon.watch(model, optimizer, action=ignore, rows=ROWS, start=self.start, **told)  # type: ignore[arg-type]
        x, y = data()
        number = self.start
        for _ in range(steps):
            number += 1
            while self.skips(number):
                number += 1
            ids = plan(number)
            mine = ids[dist.get_rank() :: dist.get_world_size()]
            optimizer.zero_grad()
            w.batch(self.form(mine))
            loss = nn.functional.cross_entropy(model(x[mine]), y[mine], reduction="sum")
            (loss * dist.get_world_size() / len(ids)).backward()
            optimizer.step()
            if self.scored and number % PER_EPOCH == 0:
                self._score(w, inner)
        w.close()
        return seen_by(w)

    @torch.no_grad()
    def _score(self, w: Any, inner: nn.Module) -> None:
        inner.eval()
        x, y = data()
        found = inner(x).argmax(1)
        w.evaluated(self.form(list(range(ROWS))), found, y, {"accuracy": float((found == y).float().mean())}, rows=ROWS)
        inner.train()


def every_tenth(number: int) -> bool:
    """A batch in each second epoch, somewhere in its middle."""
    return number % (2 * PER_EPOCH) == BATCH - 1
