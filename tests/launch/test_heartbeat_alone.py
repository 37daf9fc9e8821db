"""The two threads of a heartbeat, over a store in this process that says of the other ranks what a test wants."""

from __future__ import annotations

import itertools
import json
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore, Store, TCPStore

from andon.console.messages import Exit
from andon.launch.heartbeat import Heartbeat, Timeouts
from andon.launch.report import Report
from andon_contracts.liveness.diagnosis import UPDATE, Pauses, RankStatus, StepClock
from andon_contracts.liveness.process import Process
from andon_contracts.liveness.store_link import SignedStore
from tests.launch.beating import AT, own_store, world
from tests.launch.pipes import PATIENCE_S

STEP_S = 0.2
SECRET = bytes(32)
WAITS = RankStatus(ticks=1, step=3, phase=UPDATE, waits=True)


_numbers = itertools.count(1)


def tell(store: Any, rank: int, told: RankStatus, process: Process | None = None) -> None:
    """Have a rank that is in this process, or in the given one, tell this of itself."""
    sign = {"number": next(_numbers), "process": (process or Process.here()).to_json(), "status": told.to_json()}
    SignedStore(store, SECRET).set(f"beat {rank}", json.dumps(sign))


def wait_for(what: Callable[[], object]) -> None:
    pause, deadline = threading.Event(), time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < deadline, "it does not come"
        pause.wait(0.01)


class Alone:
    """Rank `rank` of `world`, its store, and the reports of the ends that its heartbeat makes."""

    def __init__(self, store: Any, world: int, clock: StepClock, limits: Timeouts, rank: int = 0) -> None:
        self.ends: queue.SimpleQueue[Report] = queue.SimpleQueue()
        self.said: list[str] = []
        self.clock = clock
        self.heart = Heartbeat(SignedStore(store, SECRET), rank, world, clock, limits, self.ends.put, self.said.append)

    def wait_until_known(self, rank: int, what: str) -> None:
        wait_for(lambda: getattr(self.heart.view().statuses[rank], what))

    def end(self) -> Report:
        return self.ends.get(timeout=PATIENCE_S)


@contextmanager
def alone(
    store: Any, world: int, clock: StepClock | None = None, timeouts: Timeouts | None = None, rank: int = 0
) -> Iterator[Alone]:
    made = Alone(store, world, clock or StepClock(), timeouts or Timeouts(PATIENCE_S), rank)
    try:
        yield made
    finally:
        made.heart.leave(Exit.OK, "")


LATE = f"the update of step 3 took longer than run.step_deadline_s, {STEP_S:g} s: "


@pytest.mark.parametrize(
    ("ended", "code", "cause"),
    [
        (f"{LATE}rank 1 of 2 is slow: in a loop", Exit.RANK_SILENT, f"{LATE}rank 1 of 2 is slow: in a loop"),
        ("LookupError: x", Exit.CRASHED, f"{LATE}rank 1 of 2 ended: LookupError: x; 1 waits"),
    ],
    ids=["by the same deadline", "for a reason of its own"],
)
def test_who_passes_a_deadline_after_another_ended_names_that_one(ended: str, code: Exit, cause: str) -> None:
    store = HashStore()
    tell(store, 1, replace(WAITS, waits=False, ended=ended, exit=int(code)))
    with alone(store, 2, timeouts=Timeouts(PATIENCE_S, STEP_S)) as made:
        made.wait_until_known(1, "ended")
        made.clock.at(3, UPDATE)
        made.clock.wait()
        found = made.end()
    assert (found.exit, found.cause) == (Exit.RANK_SILENT, cause)


def test_the_update_that_compiles_has_no_deadline() -> None:
    """Only the first update of a process that compiles: what it took is not what a step usually takes."""
    clock = StepClock(compiles=True)
    with alone(HashStore(), 1, clock, Timeouts(PATIENCE_S, STEP_S)) as made:
        clock.at(4, UPDATE)  # the first after a resume
        clock.at(4, UPDATE)
        wait_for(lambda: clock.read().phase_s > 3 * STEP_S)
        assert made.ends.empty()
        clock.at(5, UPDATE)
        assert clock.usual_s() == 0.0
        found = made.end()
    assert (found.exit, found.step) == (Exit.RANK_SILENT, 5)
    assert found.cause.startswith("the update of step 5 took longer than run.step_deadline_s")


def test_a_deadline_waits_for_a_sign_of_this_step() -> None:
    """What rank 1 told last is of before the step: who is slow is said once it has told where it is now."""
    store = HashStore()
    tell(store, 1, replace(WAITS, ticks=0, step=2, waits=False))
    clock = StepClock()
    clock.wait()
    with alone(store, 2, clock, Timeouts(1.0, STEP_S, PATIENCE_S)) as made:
        made.wait_until_known(1, "step")
        clock.at(3, UPDATE)
        wait_for(lambda: clock.read().phase_s > 2 * STEP_S)
        tell(store, 1, replace(WAITS, ticks=2))
        found = made.end()
    assert found.cause.startswith(f"{LATE}rank 0 of 2 is slow: in the update of step 3")


class Counted:
    def __init__(self, store: Store) -> None:
        self.asked: list[str] = []
        self._store = store

    def __getattr__(self, name: str) -> Any:
        self.asked.append(name)
        return getattr(self._store, name)


class Late(Counted):
    def multi_get(self, keys: list[str]) -> list[bytes]:
        """What rank 1 told before it ended, then what it told at its end."""
        self.asked.append("multi_get")
        first = self.asked.count("multi_get") == 1
        told = WAITS if first else replace(WAITS, ended="LookupError: x", exit=int(Exit.CRASHED))
        tell(self._store, 1, told, replace(Process.here(), started=1))
        return self._store.multi_get(keys)


def test_a_rank_that_is_gone_has_the_last_word() -> None:
    store, clock = Late(HashStore()), StepClock()
    tell(store, 1, WAITS)
    clock.at(3, UPDATE)
    with alone(store, 2, clock, Timeouts(PATIENCE_S, STEP_S / 2)) as made:
        found = made.end()
    assert found.cause.endswith(": rank 1 of 2 ended: LookupError: x; 1 waits")


@pytest.mark.parametrize(
    ("process", "cause"),
    [(Process.here(), ""), (Process(1, 1, "elsewhere", "far"), "rank 1 of 2 (on far) gave no sign of life")],
    ids=["here", "on another machine"],
)
def test_only_a_rank_that_cannot_be_seen_may_be_lost_in_silence(process: Process, cause: str) -> None:
    store = HashStore()
    tell(store, 1, WAITS, process)
    with alone(store, 2) as made:
        made.wait_until_known(1, "ticks")
        found = made.heart.explain(Exit.RANK_LOST)
    assert found.startswith(cause)
    assert bool(found) == bool(cause)


def test_a_store_that_is_gone_accuses_nobody() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    tell(store, 1, WAITS, Process(1, 1, "elsewhere", "far"))
    client = TCPStore("127.0.0.1", store.port, is_master=False)
    with alone(client, 2, timeouts=Timeouts(1.0)) as made:
        made.wait_until_known(1, "ticks")
        del store
        wait_for(lambda: made.heart.view().link_error)
        assert made.heart.explain(Exit.RANK_LOST).startswith("the ranks' store is gone (")
        assert made.heart.explain(Exit.RANK_SILENT).startswith("the ranks' store is gone (")


class Broken(StepClock):
    broken = False

    def read(self) -> RankStatus:
        if self.broken:
            raise LookupError("nobody foresaw this")
        return super().read()


def test_a_rank_does_not_go_on_without_its_watch() -> None:
    clock = Broken()
    with alone(HashStore(), 1, clock) as made:
        clock.broken = True
        found = made.end()
    assert found.exit == Exit.CRASHED
    assert found.cause == "the watch over this rank failed: LookupError: nobody foresaw this"
    assert "in read" in found.message


class Foreign(Counted):
    def multi_get(self, keys: list[str]) -> list[bytes]:
        raise LookupError("nobody foresaw this")


def test_a_rank_that_cannot_read_the_others_says_so() -> None:
    store = HashStore()
    tell(store, 1, WAITS)
    with alone(Foreign(store), 2) as made:
        found = made.end()
    told = json.loads(SignedStore(store, SECRET).get("beat 0"))["status"]
    assert found.exit == told["exit"] == Exit.CRASHED
    assert found.cause == told["ended"] == "the watch over this rank failed: LookupError: nobody foresaw this"


def test_what_no_rank_has_put_into_the_store_is_dropped_and_counted() -> None:
    store = HashStore()
    tell(store, 1, WAITS)
    with alone(store, 3, timeouts=Timeouts(1.0)) as made:
        made.wait_until_known(1, "ticks")
        unsigned = SignedStore(store, SECRET).get("beat 1").decode().replace('"ticks": 1', '"ticks": 2')
        for garbage in ("not JSON", unsigned, "[" * 100_000):
            store.set("beat 1", garbage)
            store.set("beat 2", garbage)
            rounds = made.heart._rounds
            wait_for(lambda rounds=rounds: made.heart._rounds > rounds + 2)  # type: ignore[misc]
        assert made.heart.view().statuses[1].ticks == WAITS.ticks
        tell(store, 2, WAITS)
        made.wait_until_known(2, "ticks")
        assert made.ends.empty()
        assert made.said == []
    assert made.said == ["rank 0 ignored 6 values in the ranks' store that no rank of this run wrote"]


def test_a_beat_asks_the_store_once_for_all() -> None:
    store = Counted(HashStore())
    for rank in range(1, 4):
        tell(store, rank, WAITS)
    with alone(store, 4, timeouts=Timeouts(1.0)) as made:
        wait_for(lambda: all(made.heart.view().statuses[rank].ticks for rank in range(1, 4)))
        del store.asked[:]
        wait_for(lambda: len(store.asked) >= 9)
        asked = store.asked[:9]
    assert sorted(asked) == ["check"] * 3 + ["multi_get"] * 3 + ["set"] * 3


# A time in which this process did not run, as its clocks show it: it counts for nothing, and accuses nobody.


SLEPT_S = 3600.0
TIMEOUTS = Timeouts(600.0, silence_s=600.0)  # something is slow after ten seconds


class Clocks:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead = self.used = 0.0
        wall, cpu = time.monotonic, time.process_time
        monkeypatch.setattr(time, "monotonic", lambda: wall() + self.ahead)
        monkeypatch.setattr(time, "process_time", lambda: cpu() + self.used)


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    return Clocks(monkeypatch)


def test_a_gap_is_left_out_of_what_it_is_in(clocks: Clocks) -> None:
    pauses = Pauses()
    before = time.monotonic()
    pauses.start(1.0)
    clocks.ahead += SLEPT_S
    ran, lost = pauses.ran_s(before)
    assert lost == pytest.approx(SLEPT_S, abs=30)
    assert ran < 30
    assert pauses.ran_s(before + SLEPT_S / 2)[1] == pytest.approx(SLEPT_S / 2, abs=30)
    assert pauses.ran_s(time.monotonic())[1] == 0


@pytest.mark.parametrize(("passed", "used"), [(SLEPT_S, SLEPT_S), (0.0, 0.0)])
def test_who_computes_or_looks_often_does_not_pause(clocks: Clocks, passed: float, used: float) -> None:
    """Native code that holds the interpreter for an hour uses an hour of a CPU; a short gap is none."""
    pauses = Pauses()
    before = time.monotonic()
    pauses.start(PATIENCE_S)
    clocks.ahead, clocks.used = passed, used
    ran, lost = pauses.ran_s(before)
    assert (lost, ran >= passed) == (0, True)


def test_nobody_pauses_before_somebody_looks(clocks: Clocks) -> None:
    clock = StepClock()
    clocks.ahead += SLEPT_S
    assert clock.read().since_s >= SLEPT_S


@contextmanager
def paused(clocks: Clocks, told: RankStatus, timeouts: Timeouts = TIMEOUTS) -> Iterator[Alone]:
    """Rank 0 waits; all stood still for an hour, and both threads of its heartbeat have looked several times since."""
    store = Counted(HashStore())
    tell(store, 1, told)
    with alone(store, 2, timeouts=timeouts) as made:
        made.clock.at(3, UPDATE)
        made.clock.wait()
        made.wait_until_known(1, "step")
        clocks.ahead += SLEPT_S
        del store.asked[:]
        wait_for(lambda: len(store.asked) >= 8)
        yield made


@pytest.mark.parametrize("waits", [False, True])
def test_nobody_is_slow_because_all_were_paused(clocks: Clocks, waits: bool) -> None:
    with paused(clocks, replace(WAITS, ticks=0, waits=waits)) as made:
        assert made.said == []
        mine, other = made.heart.view().statuses.values()
        assert max(mine.since_s, mine.phase_s, other.silent_s, other.since_s) < PATIENCE_S
        assert mine.paused_s == pytest.approx(SLEPT_S, abs=PATIENCE_S)


def test_a_wait_that_ended_because_of_a_pause_accuses_nobody(clocks: Clocks) -> None:
    """The transport's own clock went on: its wait is over, and what is said is that this process did not run."""
    with paused(clocks, replace(WAITS, ticks=0, waits=False)) as made:
        found = made.heart.explain(Exit.RANK_SILENT)
    assert found.startswith("this process did not run for 36")
    assert "rank 1" not in found


def test_a_deadline_does_not_count_a_pause(clocks: Clocks) -> None:
    with paused(clocks, WAITS, Timeouts(600.0, 600.0, 600.0)) as made:
        assert made.ends.empty()


# Slow, hung and dead are told apart by ranks themselves: what they say, in which order, and how they end.


SHORT_S = 1.0  # how long gloo waits where that is to end in vain


def test_a_rank_that_hangs_is_named_and_ends_itself(tmp_path: Path) -> None:
    with world(tmp_path, 2) as ranks:
        waited, hung = ranks.start([0, 1], {"rank 1": "hangs", "timeout_s": SHORT_S}).ended(0, 1)
        said = ranks.said(0).splitlines()
    assert (waited.exit, hung.exit) == (Exit.RANK_SILENT, Exit.RANK_SILENT)
    assert f"rank 1 of 2 hangs in the update of step {AT} " in waited.cause
    assert "hang_here" in waited.cause
    assert "Timed out waiting" in waited.cause
    assert hung.cause.startswith(f"rank 1 of 2 hangs in the update of step {AT} ")
    assert "rank 0 of 2 ended: " in hung.cause
    assert "in hang_here" in hung.message
    words = [f"rank 1 of 2 is slow: in the update of step {AT} ", "rank 0: rank 1 of 2 hangs "]
    told = [word for line in said for word in words if word in line]
    assert list(dict.fromkeys(told)) == words, said


def test_a_slow_rank_is_named_once_and_the_run_goes_on(tmp_path: Path) -> None:
    with world(tmp_path, 3) as ranks:
        options = {"rank 1": "dawdles", "bound_s": SHORT_S}
        ends = ranks.start([0, 1, 2], options).ended(0, 1, 2)
        said = [ranks.said(rank) for rank in range(3)]
    assert [end.exit for end in ends] == [Exit.OK] * 3
    assert re.search(
        rf"andon: rank 1 of 3 is slow: in the update of step {AT} for [\d.]+ s, .*; 2 wait for it", said[0]
    )
    assert said[1] + said[2] == ""


@pytest.mark.parametrize(
    ("what", "code", "words"),
    [
        ("SIGKILL", Exit.RANK_LOST, "rank 1 of 2 is gone without a word, last seen in "),
        ("fails", Exit.RANK_LOST, "rank 1 of 2 ended: LookupError: its own error"),
        ("SIGSTOP", Exit.RANK_SILENT, "rank 1 of 2 is stopped (by a signal, a debugger), last seen in "),
    ],
)
def test_what_became_of_the_other_rank_is_in_the_line(tmp_path: Path, what: str, code: Exit, words: str) -> None:
    with world(tmp_path, 2) as ranks:
        (waited,) = ranks.start([0, 1], {"rank 1": what, "timeout_s": 2 * SHORT_S}).ended(0)
        said = ranks.said(0)
    assert waited.exit == code
    assert waited.cause.startswith(words)
    assert f"rank 0: {words}" in said


def test_a_rank_does_not_go_on_where_nobody_looks_after_its_agent(tmp_path: Path) -> None:
    words = "the watch over this rank failed: LookupError: nobody foresaw this"
    with world(tmp_path, 2) as ranks:
        waited, unguarded = ranks.start([0, 1], {"rank 1": "is unguarded", "timeout_s": 20.0}).ended(0, 1)
        said = ranks.said(1)
    assert (unguarded.exit, unguarded.cause) == (Exit.CRASHED, words)
    assert waited.exit == Exit.RANK_LOST
    assert waited.cause.startswith(f"rank 1 of 2 ended: {words}")
    assert f"rank 1: {words}" in said


@pytest.mark.parametrize(("there", "missing"), [(0, 1), (1, 0)])
def test_a_rank_that_does_not_come_is_named(tmp_path: Path, there: int, missing: int) -> None:
    with world(tmp_path, 2) as ranks:
        (waited,) = ranks.start([there], {"timeout_s": SHORT_S}).ended(there)
    assert waited.exit == Exit.RANK_SILENT
    assert waited.cause.startswith(f"Absent: rank {missing} of 2 did not come within {SHORT_S:g} s")


def test_an_interface_that_is_not_there_is_named_on_every_rank(tmp_path: Path) -> None:
    wrong = {"variables of 1": {"GLOO_SOCKET_IFNAME": "nowhere0"}}
    with world(tmp_path, 2) as ranks:
        told, mistaken = ranks.start([0, 1], wrong).ended(0, 1)
    assert (told.exit, mistaken.exit) == (Exit.RANK_LOST, Exit.USAGE)
    assert mistaken.cause.startswith(
        f"GLOO_SOCKET_IFNAME: nowhere0: no such interface on {os.uname().nodename}, only lo"
    )
    assert "rank 1 of 2 cannot join: GLOO_SOCKET_IFNAME: nowhere0" in told.cause


def test_a_store_that_an_earlier_world_used_can_be_met_in_again(tmp_path: Path) -> None:
    """torchrun keeps one store for all attempts: nobody takes the dead of an earlier one for those that are to come."""
    store = own_store()
    attempts: list[tuple[list[int], dict[str, object], Exit]] = [
        ([0, 1], {"rank 1": "SIGKILL"}, Exit.RANK_LOST),
        ([0], {"timeout_s": SHORT_S}, Exit.RANK_SILENT),
        ([0, 1], {}, Exit.OK),
    ]
    for number, (there, options, code) in enumerate(attempts):
        folder = tmp_path / str(number)
        folder.mkdir()
        with world(folder, 2, store) as ranks:
            (end,) = ranks.start(there, options).ended(0)
        assert end.exit == code, end.cause
        assert ("rank 1 of 2 did not come" in end.cause) == (there == [0])
