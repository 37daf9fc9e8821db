"""Forward passes as they are seen: rows that count for nothing, and random numbers that are drawn.

A loop may call its model with rows that only keep the ranks in step, and multiply their losses by 0. Such a row is not
trained on, so its forward pass is no visit of it. That is seen in the backward pass, at what the model gave out. What a
forward pass drew is seen by the state of torch's generator before and behind it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from andon_falsify.loops.sightings import LoopSightings, Stranger

_EXACT = (torch.float32, torch.float64)
"""Types in which the gradient of a row that counts does not underflow."""


@dataclass
class _Pass:
    """A forward pass of update `step`: the number of its micro-batch there, and what each place of the call holds."""

    step: int
    leaf: int
    called: Sequence[int | str | None]
    counted: Tensor | None = None
    """bool [places]: whether a backward pass had a gradient for what was given out there; None before any has."""


@dataclass
class Weighing:
    """Takes out of `seen` the visits of one rank that counted for nothing."""

    seen: LoopSightings
    rank: int
    _passes: list[_Pass] = field(default_factory=list)

    def called(self, step: int, leaf: int, called: Sequence[int | str | None]) -> None:
        """The model is called with these rows; None for one without a label."""
        self._passes.append(_Pass(step, leaf, called))

    def gave(self, output: Any) -> None:
        """It gave out `output` in that call."""
        scores = _scores(output)
        if not self._passes or scores is None or scores.dtype not in _EXACT or not scores.requires_grad:
            return
        last = self._passes[-1]
        if scores.dim() < 2 or len(scores) != len(last.called):
            return
        # A row whose class is certain has no gradient either, and was trained on.
        certain = scores.detach().flatten(1).softmax(-1).amax(-1) == 1

        def weigh(gradient: Tensor) -> None:
            counted = gradient.flatten(1).ne(0).any(1) | certain
            last.counted = counted if last.counted is None else last.counted | counted

        scores.register_hook(weigh)  # type: ignore[no-untyped-call]

    def settle(self) -> None:
        """The forward passes since the last call belong to one update, whose backward passes are over."""
        passes, self._passes = self._passes, []
        for each in passes:
            if each.counted is None or bool(each.counted.all()):
                continue
            pairs = list(zip(each.called, each.counted.tolist(), strict=True))
            kept = tuple(row for row, counts in pairs if counts and isinstance(row, int))
            self.seen.of(self.rank, each.step).leaves[each.leaf] = kept
            for row, counts in pairs:
                if isinstance(row, str) and not counts:
                    self.seen.strangers.remove(Stranger(each.step, self.rank, row))
            self.seen.weightless += [row for row, counts in pairs if isinstance(row, int) and not counts]


def _scores(output: Any) -> Tensor | None:
    """What a model gives out for each row: its logits, or its only or first tensor."""
    found = getattr(output, "logits", output)
    found = found[0] if isinstance(found, tuple | list) and found else found
    return found if isinstance(found, Tensor) else None


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
