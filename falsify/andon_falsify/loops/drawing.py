"""Random numbers of forward passes, as they are seen: the state of torch's generator before and behind each."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn

from andon_falsify.loops.sightings import LoopSightings


class Draws:
    """Enters into `seen` what a forward pass of `rank` drew from torch's generator: its state before it, or nothing."""

    def __init__(self, seen: LoopSightings, rank: int) -> None:
        self._seen = seen
        self._rank = rank
        self._before: tuple[int, int, str] | None = None

    def before_forward(self, step: int, rows: int) -> None:
        """A forward pass of update `step` begins, of so many rows."""
        self._before = (step, rows, _state())

    def after_forward(self, module: nn.Module, *_: Any) -> None:
        """It ended."""
        if self._before is None:
            return
        step, rows, state = self._before
        self._before = None
        if state != _state():
            self._seen.draws.setdefault((self._rank, step), state)
        elif rows:
            self._seen.undrawn.setdefault((self._rank, step), module.training)


def _state() -> str:
    return hashlib.blake2b(torch.get_rng_state().numpy().tobytes(), digest_size=8).hexdigest()
