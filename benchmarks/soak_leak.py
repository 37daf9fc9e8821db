"""Leaks that are planted in the soak, each of which it must find: its controls (`--leak`).

`handle` and `memory`: each generation of workers leaves an open file, or 256 KiB, in the launcher. `rank`: each rank
keeps so many bytes of every step that in a million steps they are a quarter more than the soak allows.
"""

from __future__ import annotations

import os
from typing import Any

from benchmarks.soak_verdict import ALLOWED
from falsify.nemesis.planting import Planting

LEAKS = {
    "handle": "launcher: open files",
    "memory": "launcher: memory, KiB",
    "rank": "ranks: memory in use once settled, KiB",
}
"""By what leaks, the row in which it must be seen."""
IN_RANKS = ("rank",)
A_STEP = ALLOWED * 5 // 4
_GENERATION = 256 * 1024
_kept: list[object] = []


def handle(plan: Planting) -> None:
    """Every generation that begins leaves an open file behind."""
    _with_each_generation(lambda: os.open(os.devnull, os.O_RDONLY))
    plan.acted()


def memory(plan: Planting) -> None:
    """Every generation that begins leaves memory behind."""
    _with_each_generation(lambda: os.urandom(_GENERATION))
    plan.acted()


def rank(plan: Planting) -> None:
    """Every rank keeps `A_STEP` bytes of each step."""
    from andon.step.step import TrainingStep

    launch = TrainingStep.launch

    def leaking(self: TrainingStep, *args: Any, **named: Any) -> Any:
        _kept.append(bytes(A_STEP))
        return launch(self, *args, **named)

    TrainingStep.launch = leaking  # type: ignore[method-assign]
    plan.acted()


def _with_each_generation(left: Any) -> None:
    from andon.launch import elastic

    original = elastic._Generations._generation

    def leaking(generations: Any, number: int) -> Any:
        _kept.append(left())
        return original(generations, number)

    setattr(elastic._Generations, "_generation", leaking)  # noqa: B010 - not for the type checker
