"""Finished and interrupted runs on one data set, and a process with stock transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.folders import copy, interrupted, runs, whole
from tests.support.stock import Stock

__all__ = ["copy", "interrupted", "runs", "whole"]


@pytest.fixture(scope="session")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stock]:
    """Runs programs in a process with stock transformers and without Andon."""
    with Stock(Path(tmp_path_factory.mktemp("stock"))) as started:
        yield started
