"""One data set and one uninterrupted run, with which the others are compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.runs import Runs, write_jsonl


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Starts runs."""
    return Runs(write_jsonl(tmp_path_factory.mktemp("data") / "train.jsonl"))


@pytest.fixture(scope="session")
def whole(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of one worker that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert runs.train(folder) == 0
    return folder
