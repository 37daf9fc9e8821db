"""How ranks meet in a store into which somebody has put what is none of theirs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from torch._C._distributed_c10d import HashStore, Store

from andon.launch.joining import Meeting
from falsify.nemesis.attacker import GARBAGE
from tests.launch.pipes import PATIENCE_S

WORDS = ("0" * 16, "1" * 16)


@pytest.mark.parametrize("garbage", GARBAGE)
def test_ranks_meet_whatever_else_stands_in_their_store(garbage: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    """A call, an answer, a presence and a verdict that nobody gave: both wait for the real ones, and say so."""
    store = HashStore()
    world = f"andon/world/{WORDS[0]}"
    for key in ("andon/call 1", f"andon/answer 1 {WORDS[1]}", f"{world}/here 1", f"{world}/verdict"):
        store.set(key, garbage)  # type: ignore[arg-type]

    def meet(rank: int) -> Store:
        return Meeting(store, rank, 2, PATIENCE_S, WORDS[rank]).meet("")

    with ThreadPoolExecutor(2) as ranks:
        first, second = ranks.map(meet, range(2))
    first.set("met", "here")
    assert second.get("met") == b"here"
    assert "andon: rank 1 ignored " in capfd.readouterr().err
