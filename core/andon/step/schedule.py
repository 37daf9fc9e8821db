"""The learning rate of an update: a function of its number, so that a resume cannot restart it."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up over w updates, then half a cosine or a line down to `min_lr`, or a constant rate.

    w is `warmup_steps`, or floor(warmup_fraction * total_steps) if that is None. Update t (from 1) of the warm-up has
    peak * t / w; the seed's S29 starts from 0, but an update at rate 0 trains nothing. Update t > w has, with
    p = (t - w) / (total - w), min + (peak - min) * x: x is (1 + cos(pi * p)) / 2 for a cosine and 1 - p for a line.
    """

    peak_lr: float
    total_steps: int
    warmup_fraction: float = 0.1
    min_lr: float = 1e-6
    kind: str = "cosine"
    warmup_steps: int | None = None

    def rate(self, step: int) -> float:
        """The learning rate of update `step`, counted from 1. Raises `ValueError` for a step outside the run."""
        if not 1 <= step <= self.total_steps:
            msg = f"step {step} is outside 1 to {self.total_steps}"
            raise ValueError(msg)
        fraction = math.floor(self.warmup_fraction * self.total_steps)
        warmup = fraction if self.warmup_steps is None else self.warmup_steps
        if step <= warmup:
            return self.peak_lr * (step / warmup)
        if self.kind == "constant":
            return self.peak_lr
        progress = (step - warmup) / (self.total_steps - warmup)
        floor = min(self.min_lr, self.peak_lr)
        left = 1.0 - progress if self.kind == "linear" else (1.0 + math.cos(math.pi * progress)) / 2.0
        return floor + (self.peak_lr - floor) * left
