"""Ranks that the tests of one file share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from andon_falsify.ranks.pool import RankPools


@pytest.fixture(scope="module")
def pools(request: pytest.FixtureRequest) -> Iterator[RankPools]:
    """Ranks of the numbers in the file's `WORLDS`, there before a test looks which processes there are."""
    with RankPools() as held:
        for world in request.module.WORLDS:
            held.of(world).run("builtins:repr", "")
        yield held
