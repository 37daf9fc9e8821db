"""A time in which this process did not run, as its clocks show it: it counts for nothing, and accuses nobody."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from torch._C._distributed_c10d import HashStore

from andon.console.exits import Exit
from andon.launch.heartbeat import Timeouts
from andon_contracts.liveness.clock import Pauses, StepClock
from andon_contracts.liveness.diagnosis import UPDATE
from tests.launch.pipes import PATIENCE_S
from tests.launch.test_heartbeat_alone import WAITS, Alone, Counted, alone, tell, wait_for

SLEPT_S = 3600.0
TIMEOUTS = Timeouts(600.0, silence_s=600.0)
"""Something is slow after ten seconds."""


class Clocks:
    """The clocks of this process, which a test moves on by itself."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead = self.used = 0.0
        wall, cpu = time.monotonic, time.process_time
        monkeypatch.setattr(time, "monotonic", lambda: wall() + self.ahead)
        monkeypatch.setattr(time, "process_time", lambda: cpu() + self.used)


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    return Clocks(monkeypatch)


def test_a_gap_is_left_out_of_what_it_is_in(clocks: Clocks) -> None:
    """Of an hour in which nothing ran, each span has as much left out as of it falls into that hour."""
    pauses = Pauses()
    before = time.monotonic()
    pauses.begin(1.0)
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
    pauses.begin(PATIENCE_S)
    clocks.ahead, clocks.used = passed, used
    ran, lost = pauses.ran_s(before)
    assert (lost, ran >= passed) == (0, True)


def test_nobody_pauses_before_somebody_looks(clocks: Clocks) -> None:
    clock = StepClock()
    clocks.ahead += SLEPT_S
    assert clock.read().since_s >= SLEPT_S


def paused(clocks: Clocks, made: Alone, store: Counted) -> None:
    """Everything stood still for an hour, and both threads of the heartbeat have looked several times since."""
    made.wait_until_known(1, "step")
    clocks.ahead += SLEPT_S
    del store.asked[:]
    wait_for(lambda: len(store.asked) >= 8)


@pytest.mark.parametrize("waits", [False, True])
def test_nobody_is_slow_because_all_were_paused(clocks: Clocks, waits: bool) -> None:
    """Rank 0 waits, rank 1 computes or waits too, and all of them are stopped, or their machine sleeps, for an hour."""
    store = Counted(HashStore())
    tell(store, 1, replace(WAITS, ticks=0, waits=waits))
    with alone(store, 2, timeouts=TIMEOUTS) as made:
        made.clock.at(3, UPDATE)
        made.clock.wait()
        paused(clocks, made, store)
        assert made.said == []
        mine, other = made.heart.view().signs.values()
        assert max(mine.since_s, mine.phase_s, other.silent_s, other.since_s) < PATIENCE_S
        assert mine.paused_s == pytest.approx(SLEPT_S, abs=PATIENCE_S)


def test_a_wait_that_ended_because_of_a_pause_accuses_nobody(clocks: Clocks) -> None:
    """The transport's own clock went on: its wait is over, and what is said is that this process did not run."""
    store = Counted(HashStore())
    tell(store, 1, replace(WAITS, ticks=0, waits=False))
    with alone(store, 2, timeouts=TIMEOUTS) as made:
        made.clock.at(3, UPDATE)
        made.clock.wait()
        paused(clocks, made, store)
        found = made.heart.explain(Exit.RANK_SILENT)
    assert found.startswith("this process did not run for 36")
    assert "rank 1" not in found


def test_a_deadline_does_not_count_a_pause(clocks: Clocks) -> None:
    store = Counted(HashStore())
    tell(store, 1, WAITS)
    with alone(store, 2, timeouts=Timeouts(600.0, 600.0, 600.0)) as made:
        made.clock.at(3, UPDATE)
        made.clock.wait()
        paused(clocks, made, store)
        assert made.ends.empty()
