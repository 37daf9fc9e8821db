"""The rules that our trainer publishes: which rows an update has, and at which learning rate."""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate


class PublishedPlan(Mapping[int, Sequence[int]]):
    """The global batches of our trainer by its published rule: update from 1 -> rows in order.

    `rows` are shuffled with the key (seed, epoch) and cut into batches; the last batch of an epoch has the rest.
    updates: of an epoch of packs, which are divided so that earlier updates have at most one more. Only the order of
    the epoch that was accessed last is in memory.
    """

    def __init__(self, rows: Sequence[int], seed: int, batch_size: int, steps: int, updates: int | None = None) -> None:
        self._rows, self._seed = rows, seed
        sizes = [min(batch_size, len(rows) - at) for at in range(0, len(rows), batch_size)]
        if updates is not None:
            sizes = [len(range(first, len(rows), updates)) for first in range(updates)]
        self._ends = list(accumulate(sizes, initial=0))
        self._steps = steps if sizes else 0
        self._epoch, self._order = -1, array("q")

    def __getitem__(self, update: int) -> Sequence[int]:
        if not 1 <= update <= self._steps:
            raise KeyError(update)
        epoch, place = divmod(update - 1, len(self._ends) - 1)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, array("q", self._rows)
            random.Random(f"andon order {self._seed} {epoch}").shuffle(self._order)
        return self._order[self._ends[place] : self._ends[place + 1]].tolist()

    def __iter__(self) -> Iterator[int]:
        return iter(range(1, self._steps + 1))

    def __len__(self) -> int:
        return self._steps


@dataclass(frozen=True)
class PublishedSchedule:
    """Linear warm-up, then from `peak` half a cosine or a line down to `minimum` at the last update, or constant.

    With T = `total` updates, w = `steps`, or floor(`fraction` * T) if that is None, for update t from 1:
        lr = peak * t / w                                                       for t <= w
        lr = minimum + (peak - minimum) * (1 + cos(pi * (t - w) / (T - w))) / 2 for t >  w, cosine
        lr = peak - (peak - minimum) * (t - w) / (T - w)                        for t >  w, linear
        lr = peak                                                               for t >  w, constant
    The peak is reached at update w and the minimum at T. A `minimum` above the peak is taken as the peak.
    """

    peak: float
    total: int
    fraction: float = 0.1
    minimum: float = 0.0
    kind: str = "cosine"
    steps: int | None = None

    def __call__(self, step: int) -> float:
        """The learning rate of update `step`; it stays as it is beyond `total`. Raises `KeyError` for a kind."""
        low = min(self.minimum, self.peak)
        warmup = math.floor(self.fraction * self.total) if self.steps is None else self.steps
        if step <= warmup:
            return self.peak * step / warmup
        turn = min(1.0, (step - warmup) / (self.total - warmup)) if self.total > warmup else 1.0
        left = {"cosine": 0.5 + 0.5 * math.cos(math.pi * turn), "linear": 1.0 - turn, "constant": 1.0}[self.kind]
        return low + (self.peak - low) * left  # not down from the peak, which would leave its last digits at the end
