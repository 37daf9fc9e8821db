"""Training goes on when nobody can read what it says."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TextIO

import pytest

from tests.training.runs import Runs, outcome


def _full() -> TextIO:
    return open("/dev/full", "w", encoding="utf-8", buffering=1)


def _closed_pipe() -> TextIO:
    reading, writing = os.pipe()
    os.close(reading)
    return os.fdopen(writing, "w", buffering=1, encoding="utf-8")


def _closed() -> TextIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.fixture(params=[_full, _closed_pipe, _closed])
def broken(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[TextIO]:
    """A standard error that takes nothing."""
    stream: TextIO = request.param()
    monkeypatch.setattr(sys, "stderr", stream)
    yield stream
    with suppress(OSError):
        stream.close()


@pytest.mark.usefixtures("broken")
def test_a_run_goes_on_without_its_lines(runs: Runs, whole: Path, tmp_path: Path) -> None:
    """A full device, a reader that has gone, a closed stream: the run ends with the bits that it always has."""
    assert runs.train(tmp_path / "run", "run.log_every=1") == 0
    assert outcome(tmp_path / "run") == outcome(whole)
