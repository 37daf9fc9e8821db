"""The one thread that speaks with a board: how it ends, and that nobody waits for it longer than needed."""

from __future__ import annotations

import threading
import time

import pytest

from andon_contracts.liveness.store_link import StoreLink

PAUSE_S = 5.0


class _Handing(threading.Event):
    """An event after whose `set` the threads that waited for it run first."""

    def set(self) -> None:
        super().set()
        time.sleep(0.2)


def test_a_link_that_is_closed_ends_without_another_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "Event", _Handing)
    rounds: list[int] = []
    said: list[str] = []
    first = threading.Event()

    def routine() -> float:
        rounds.append(1)
        first.set()
        return PAUSE_S

    link = StoreLink("link", routine, lambda error: None)
    assert first.wait(PAUSE_S)
    time.sleep(0.5)  # so that the thread is in its pause
    began = time.monotonic()
    link.close(lambda: said.append("last"), 2 * PAUSE_S)
    assert time.monotonic() - began < PAUSE_S / 2
    assert (said, rounds) == (["last"], [1])
