"""Ranks that the tests of one file share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from andon_falsify.ranks.pool import RankPools


@pytest.fixture(scope="module")
def pools(request: pytest.FixtureRequest) -> Iterator[RankPools]:
    """Ranks of the numbers and backends in the file's `PLACES`, there before a test looks which processes there are."""
    with RankPools() as held:
        for place in request.module.PLACES:
            held.of(*place).run("builtins:repr", "")
        yield held
