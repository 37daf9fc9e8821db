"""A rank as the soak has them, on a toy task: `python -m tests.falsify.soaked FOLDER CLEAN LEAKING`.

It trains so many steps as it is, then so many with the leak of `--leak rank`; its account of itself is in the folder.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import torch

from andon.backend.inprocess import InlineBackend
from andon.step.step import TrainingStep
from falsify.nemesis.planting import VARIABLE, Plant, plant_all, written
from tests.support.toy import CPU, Settings, build, rate


def main(folder: Path, clean: int, leaking: int) -> None:
    """Train one replica, with the account planted; then plant the leak, and train on."""
    torch.set_num_threads(1)
    settings = Settings(2, clip_norm=0.2)
    step, _ = build(InlineBackend([CPU]), settings)
    step.attest_start({})
    _plant(folder, "benchmarks.soak_ranks:account")
    _train(step, settings, range(1, clean + 1))
    _plant(folder, "benchmarks.soak_leak:rank")
    _train(step, settings, range(clean + 1, clean + leaking + 1))


def _plant(folder: Path, function: str) -> None:
    os.environ[VARIABLE] = written([Plant(function)], folder)
    plant_all()


def _train(step: TrainingStep, settings: Settings, numbers: range) -> None:
    batches = settings.batches()
    for number in numbers:
        step(replace(batches[number % len(batches)], step=number), rate(1), number)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
