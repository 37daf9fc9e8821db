"""Training goes on when nobody can read what it says."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
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


@pytest.mark.parametrize("broken", [_full, _closed_pipe, _closed])
def test_a_run_goes_on_without_its_lines(
    runs: Runs, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: Callable[[], TextIO]
) -> None:
    stream = broken()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stream)  # here: pytest puts its own between a fixture and its test
        assert runs.train(tmp_path / "run", "run.log_every=1") == 0
    with suppress(OSError):
        stream.close()
    assert outcome(tmp_path / "run") == outcome(whole)
