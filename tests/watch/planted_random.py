"""The faults of randomness: dropout, augmentation of rows, and a stream that all ranks share."""

# ruff: noqa: D102 - an override does what its class says
from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tests.watch.loop import Loop
from tests.watch.planted import RANK
from tests.watch.planted_reports import Dropping


class Streams(Loop):
    """Right: dropout and noise differ between ranks, and the strength of the noise is drawn alike on all."""

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        return Dropping()

    def before_watch(self) -> None:
        torch.manual_seed(self.mask_seed())
        self.noise = random.Random(self.noise_seed())
        self.shared = torch.Generator().manual_seed(7)

    def mask_seed(self) -> int:
        """The seed of this rank's dropout."""
        return 100 + self.rank

    def noise_seed(self) -> int:
        """The seed of this rank's noise."""
        return 200 + self.rank

    def step(self, step: int) -> None:
        if "rng" in self.lines:
            self.watch.rng("dropout", "differ")
            self.watch.rng("noise", "differ", self.noise.getstate())
            self.watch.rng("strength", "agree", self.shared.get_state())
        self.strength = float(torch.rand((), generator=self.shared))
        super().step(step)

    def load(self, step: int, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        x, y = super().load(step, ids)
        drawn = torch.tensor([self.noise.gauss(0.0, 1.0) for _ in range(x.numel())])
        return x + 0.1 * self.strength * drawn.view_as(x), y


class SameMasks(Streams):
    """One seed of dropout on all ranks."""

    def mask_seed(self) -> int:
        return 100


class SameNoise(Streams):
    """One seed of the noise on all ranks."""

    def noise_seed(self) -> int:
        return 200


class DrawnOnOneRank(Streams):
    """One rank draws once more from the stream that all share, before step 4."""

    def step(self, step: int) -> None:
        if step == 4 and self.rank == RANK:
            torch.rand(1, generator=self.shared)
        super().step(step)
