"""The one thread that speaks with the ranks' store: how it ends."""

from __future__ import annotations

import threading

from andon_contracts.liveness.store_link import StoreLink

PAUSE_S = 600.0
"""Between two rounds. A test that waited for it would run into the limit of the whole run."""


def test_a_link_that_is_closed_ends_without_another_pause_or_round() -> None:
    rounds: list[int] = []
    said: list[str] = []
    first = threading.Event()

    def routine() -> float:
        rounds.append(1)
        first.set()
        return PAUSE_S

    link = StoreLink("link", routine, lambda error: None)
    assert first.wait(PAUSE_S)
    link.close(lambda: said.append("last"), 2 * PAUSE_S)
    assert (said, rounds) == (["last"], [1])
