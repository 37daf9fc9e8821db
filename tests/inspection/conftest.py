"""One small run on two workers, to be looked at."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.folders import runs
from tests.training.runs import Runs

__all__ = ["runs"]


@pytest.fixture(scope="session")
def run(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of two workers with checkpoints at steps 4, 6, 8 and 12, of which three stay."""
    folder = tmp_path_factory.mktemp("run") / "run"
    assert runs.train(folder, workers=2) == 0
    return folder
