"""One finished run, which commands are tried on that change nothing in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.folders import runs
from tests.training.runs import Runs, write_jsonl

__all__ = ["runs"]


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with an evaluation file, and beside it both files."""
    folder = tmp_path_factory.mktemp("command")
    held = write_jsonl(folder / "test.jsonl", 12)
    assert Runs(write_jsonl(folder / "train.jsonl")).train(folder / "run", f"data.eval={held}") == 0
    return folder / "run"
