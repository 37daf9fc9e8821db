"""Run folders made once in a test process; a test copies a folder before it changes it.

The conftest of a folder of tests imports the fixtures that it needs.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from andon.console.messages import Exit
from tests.training.runs import Runs, write_jsonl


@dataclass(frozen=True)
class Interrupted:
    runs: Runs
    place: Path
    made: dict[tuple[int, tuple[str, ...]], Path] = field(default_factory=dict)

    def __call__(self, folder: Path, step: int, *more: str) -> Path:
        """A run that ended after `step`, at `folder`; `more`: settings beside those of `runs`."""
        if (step, more) not in self.made:
            target = self.place / str(len(self.made))
            self.made[step, more] = self.runs.stopped(target, step, *more)
        return Path(shutil.copytree(self.made[step, more], folder))


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(write_jsonl(tmp_path_factory.mktemp("data") / "train.jsonl"))


@pytest.fixture(scope="session")
def whole(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert runs.train(folder) == Exit.OK
    return folder


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


@pytest.fixture(scope="session")
def interrupted(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Interrupted:
    return Interrupted(runs, tmp_path_factory.mktemp("interrupted"))
