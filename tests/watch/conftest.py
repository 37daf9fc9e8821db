"""What all tests of the watch share."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def libraries_out_of_the_way() -> Iterator[None]:
    """A watch reads the collector's list of objects several times, and most of them belong to pytest and libraries."""
    gc.freeze()
    yield
    gc.unfreeze()
