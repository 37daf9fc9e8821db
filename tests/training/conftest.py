"""Finished and interrupted runs on one data set, and a process with stock transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from andon.launch.launcher import warm_up
from tests.support.folders import copy, interrupted, runs, whole
from tests.support.stock import Stock
from tests.training.runs import PRELOAD

__all__ = ["copy", "interrupted", "runs", "whole"]

# Where xdist does not start the server that ranks are forked from (tests/conftest.py).
warm_up(PRELOAD)


@pytest.fixture(scope="session")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stock]:
    with Stock(Path(tmp_path_factory.mktemp("stock"))) as started:
        yield started
