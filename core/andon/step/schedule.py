"""The learning rate of an update: a pure function of its number, so that a resume cannot restart it."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class WarmupCosine:
    """Linear warm-up over floor(warmup_fraction * total_steps) updates, then half a cosine down to `min_lr`.

    Update t (from 1) of the warm-up w has peak * t / w, so that the peak is reached at t = w and no update is lost to
    a rate of zero; update t > w has min + (peak - min) * (1 + cos(pi * (t - w) / (total - w))) / 2, which is `min_lr`
    at the last one. (The seed's S29 starts from 0; an update at rate 0 trains nothing.)
    """

    peak_lr: float
    total_steps: int
    warmup_fraction: float = 0.1
    min_lr: float = 1e-6

    def rate(self, step: int) -> float:
        """The learning rate of update `step`, counted from 1. Raises `ValueError` for a step outside the run."""
        if not 1 <= step <= self.total_steps:
            msg = f"step {step} is outside 1 to {self.total_steps}"
            raise ValueError(msg)
        warmup = math.floor(self.warmup_fraction * self.total_steps)
        if step <= warmup:
            return self.peak_lr * (step / warmup)
        progress = (step - warmup) / (self.total_steps - warmup)
        floor = min(self.min_lr, self.peak_lr)
        return floor + (self.peak_lr - floor) * (1.0 + math.cos(math.pi * progress)) / 2.0
