"""What is concluded of a peer: one table, and a heartbeat and a watch that both decide by it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from andon_contracts.liveness.diagnosis import Sign, View, whom
from andon_contracts.liveness.end_messages import Teller, Whereabouts
from andon_contracts.liveness.halt_link import News
from andon_contracts.liveness.peer_monitor import PeerMonitor
from andon_contracts.liveness.pending_collectives import PendingCollectives
from andon_contracts.liveness.process import State
from andon_contracts.liveness.rules import NOTICED, Conclusion, Patience, Seen, conclude, first

PATIENCE = Patience(stopped_s=3.0, silent_s=5.0)
WORLD = 3


@pytest.mark.parametrize(
    ("seen", "conclusion"),
    [
        (Seen("runs"), "there"),
        (Seen("runs", behind=True), "behind"),
        (Seen("elsewhere", silent_s=4.9), "there"),
        (Seen("elsewhere", silent_s=5.0, behind=True), "silent"),
        (Seen("stopped", stopped_s=2.9), "there"),
        (Seen("stopped", stopped_s=3.0, silent_s=9.0), "stopped"),
        (Seen("gone", silent_s=9.0), "died"),
        (Seen("gone", exit=-9), "died"),
        (Seen("gone", exit=0), "left"),
        (Seen("gone", said=True, exit=0), "left"),
        (Seen("stopped", said=True, exit=0, stopped_s=9.0), "left"),
        (Seen("elsewhere", said=True, exit=1), "failed"),
        (Seen("gone", said=True, exit=NOTICED["lost"]), "followed"),
        (Seen("elsewhere", said=True, exit=NOTICED["silent"], silent_s=9.0), "followed"),
    ],
)
def test_one_conclusion_from_what_was_seen(seen: Seen, conclusion: Conclusion) -> None:
    assert conclude(seen, PATIENCE) == conclusion


@pytest.mark.parametrize("state", ["runs", "stopped"])
def test_a_process_that_is_seen_need_not_be_heard(state: State) -> None:
    patience = Patience(silent_s=1.0, unseen=True)
    assert conclude(Seen(state, silent_s=9.0), patience) == "there"
    assert conclude(Seen("elsewhere", silent_s=9.0), patience) == "silent"


def test_of_several_the_first_conclusion_asked_for_is_named_with_all_its_ranks() -> None:
    concluded: dict[int, Conclusion] = {4: "left", 3: "silent", 2: "died", 1: "silent"}
    assert first(concluded, ("silent", "died")) == ("silent", [1, 3])
    assert first(concluded, ("stopped",)) == (None, [])


@dataclass(frozen=True)
class Peer:
    """What can be seen of the process of a rank."""

    state: State
    code: int | None = None
    pid: int = 7
    host: str = "here"

    def look(self) -> State:
        return self.state

    def exit_code(self) -> int | None:
        return self.code


@dataclass
class Told:
    """What a link knows: the processes of the others, and what the store says of all."""

    processes: Mapping[int, Peer]
    news: News | None
    silent_s: float = 0.0
    following: int = 1
    broken: bool = False
    keeper: int | None = None
    ended: frozenset[int] = frozenset()
    left: frozenset[int] = frozenset()

    def ask(self) -> News | None:
        return self.news


HERE = Whereabouts(4, "at its update")
BEFORE = Whereabouts(4, "before its forward pass")


def monitor(peer: Peer, *, at: Whereabouts = HERE, left: bool = False, silent_s: float = 0.0) -> PeerMonitor:
    news = News(frozenset({1}) if left else frozenset(), {0: HERE, 1: at, 2: HERE})
    link = Told({1: peer, 2: Peer("runs")}, news, silent_s)
    return PeerMonitor(link, 0, PATIENCE.silent_s, PendingCollectives(range(WORLD)))  # type: ignore[arg-type]


def heard(sign: Sign) -> str:
    here = Sign(ticks=9, step=4, phase="update", waits=True, since_s=9.0, phase_s=9.0, state="runs")
    return whom(View(0, WORLD, {0: here, 1: sign, 2: here}, PATIENCE.silent_s))


class DistStoreError(RuntimeError):
    """As torch calls it where a store gave no answer."""


@pytest.mark.parametrize(
    ("watched", "beating", "said", "word"),
    [
        ({"peer": Peer("gone", -9)}, Sign(ticks=9, state="gone"), "died at step 4", "gone without a word"),
        ({"peer": Peer("gone", 0)}, Sign(ticks=9, ended="finished"), "left at step 4", "ended: finished"),
        ({"peer": Peer("runs"), "left": True}, Sign(ticks=9, ended="finished"), "left at", "ended: finished"),
        ({"peer": Peer("stopped")}, Sign(ticks=9, state="stopped"), "is stopped (by", "is stopped (by"),
        (
            {"peer": Peer("elsewhere"), "silent_s": 5.0},
            Sign(ticks=9, silent_s=5.0),
            "no sign of life for 5 s",
            "no sign of life for 5.0 s",
        ),
        ({"peer": Peer("runs"), "at": BEFORE}, Sign(ticks=8, state="runs"), "hangs at step 4", "hangs in the start"),
    ],
    ids=["died", "ended with 0", "left", "stopped", "silent", "behind"],
)
def test_a_watch_and_a_heartbeat_come_to_one_conclusion(
    watched: dict[str, object], beating: Sign, said: str, word: str
) -> None:
    error = DistStoreError("Timed out waiting for rank 1")
    found = monitor(**watched).missing(Teller(0, WORLD, HERE), error)  # type: ignore[arg-type]
    assert found is not None
    assert found.text.startswith("rank 1 of 3 ")
    assert said in found.text
    assert heard(beating).startswith("rank 1 of 3 ")
    assert word in heard(beating)


def test_who_is_itself_the_last_accuses_nobody_of_hanging() -> None:
    ahead = Whereabouts(5, "before its forward pass")
    link = Told({1: Peer("runs"), 2: Peer("runs")}, News(frozenset(), {0: HERE, 1: HERE, 2: ahead}))
    found = PeerMonitor(link, 0, 5.0, PendingCollectives(range(WORLD))).missing(  # type: ignore[arg-type]
        Teller(0, WORLD, HERE), DistStoreError("Timed out waiting")
    )
    assert found is not None
    assert found.text.startswith("rank 0 of 3 waited in vain at step 4")
    assert "rank 2 has been at step 5" in found.text


@pytest.mark.parametrize("left", [True, False])
def test_only_who_did_not_leave_in_order_is_missed(left: bool) -> None:
    found = monitor(Peer("elsewhere"), left=left, silent_s=6.0).trouble(Teller(0, WORLD, HERE))
    assert (found is None) == left


def test_nothing_is_said_of_one_that_is_gone_before_the_store_says_whether_it_left() -> None:
    watching = monitor(Peer("gone"))
    link: Told = watching._link  # type: ignore[assignment]
    news, link.news = link.news, None
    assert watching.trouble(Teller(0, WORLD, HERE)) is None
    link.news = news
    found = watching.trouble(Teller(0, WORLD, HERE))
    assert found is not None
    assert found.kind == "died"
