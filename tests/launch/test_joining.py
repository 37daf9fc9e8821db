"""How ranks meet in a store into which somebody has put what is none of theirs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from torch._C._distributed_c10d import HashStore, Store

from andon.console.messages import InputError
from andon.launch.joining import Meeting, Refused
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
        return Meeting(store, rank, 2, PATIENCE_S, "gloo", WORDS[rank]).meet("")

    with ThreadPoolExecutor(2) as ranks:
        first, second = ranks.map(meet, range(2))
    first.set("met", "here")
    assert second.get("met") == b"here"
    assert "andon: rank 1 ignored " in capfd.readouterr().err


@pytest.mark.parametrize(
    ("kinds", "problems", "expected"),
    [
        (
            ("cpu:gloo,cuda:nccl", "gloo"),
            ("", ""),
            [(InputError, "run.backend: ranks chose nccl .rank 0 on .* and gloo .rank 1 on .*name one")] * 2,
        ),
        (("gloo", "gloo"), ("", "no GPU"), [(Refused, "rank 1 of 2 cannot join: no GPU"), (InputError, "^no GPU$")]),
    ],
    ids=["different backends", "a host without a GPU"],
)
def test_no_host_decides_alone(
    kinds: tuple[str, str], problems: tuple[str, str], expected: list[tuple[type[Exception], str]]
) -> None:
    """All ranks end before a process group is made, and each says why."""
    store = HashStore()

    def meet(rank: int) -> None:
        with pytest.raises(expected[rank][0], match=expected[rank][1]):
            Meeting(store, rank, 2, PATIENCE_S, kinds[rank], WORDS[rank]).meet(problems[rank])

    with ThreadPoolExecutor(2) as ranks:
        list(ranks.map(meet, range(2)))
