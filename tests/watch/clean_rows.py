"""Right loops that tell their rows, and do with them what is right and unusual: left out, resumed, scored by all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import andon
from tests.watch.clean import Seen, ignore, seen_by
from tests.watch.clean_loops import SKIPS_FROM, momentum
from tests.watch.loop import BATCH, PER_EPOCH, ROWS, Model, data, plan


def as_array(ids: list[int]) -> Any:
    return np.array(ids, dtype=np.int64)


def as_scalars(ids: list[int]) -> Any:
    return [np.int32(row) if row % 2 else torch.tensor(row) for row in ids]


@dataclass(frozen=True)
class Told:
    """A loop over 37 rows in batches of 8 that tells its rows.

    start: the updates done before. skips: whether a batch of these rows is left out on all ranks. scored: whether
    every rank evaluates all rows for itself. scaled: whether a scaler leaves out updates, which use up rows all the
    same, and losses are told. told: what the watch is told once, beside the number of rows.
    """

    form: Callable[[list[int]], Any] = list
    start: int = 0
    skips: Callable[[int], bool] = lambda _: False
    scored: bool = False
    scaled: bool = False
    model: Callable[[], nn.Module] = Model
    told: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, steps: int) -> Seen:
        torch.manual_seed(0)
        inner = self.model()
        model = DistributedDataParallel(inner)
        optimizer = momentum([p for p in inner.parameters() if p.requires_grad])
        scaler = torch.amp.GradScaler("cpu", enabled=self.scaled, init_scale=SKIPS_FROM, growth_interval=4)
        told = {**self.told, "scaler": scaler} if self.scaled else self.told
        w = andon.watch(model, optimizer, action=ignore, rows=ROWS, start=self.start, **told)
        torch.manual_seed(100 + dist.get_rank())
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
            with torch.autocast("cpu", dtype=torch.float16, enabled=self.scaled):
                loss = nn.functional.cross_entropy(model(x[mine]), y[mine], reduction="sum")
            scaler.scale(loss * dist.get_world_size() / len(ids)).backward()
            if self.scaled:
                total = loss.detach().double()
                dist.all_reduce(total)
                w.loss(loss.detach(), len(mine), float(total / len(ids)))
            scaler.step(optimizer)
            scaler.update()
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


def loss_sum(model: nn.Module, ids: Sequence[int]) -> tuple[Tensor, int]:
    x, y = data()
    index = torch.tensor(list(ids))
    return nn.functional.cross_entropy(model(x[index]), y[index], reduction="sum"), len(ids)


def every_tenth(number: int) -> bool:
    """A batch in each second epoch, somewhere in its middle."""
    return number % (2 * PER_EPOCH) == BATCH - 1
