"""The two threads of one rank's pulse, over a store in this process that says of the other ranks what a test wants."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

from torch._C._distributed_c10d import HashStore

from andon.exits import Exit
from andon.launch.clock import UPDATE, StepClock
from andon.launch.pulse import Bounds, Pulse
from andon.launch.report import Report
from andon.launch.signs import Sign
from andon_contracts.peers import Process
from tests.launch.pipes import PATIENCE_S

STEP_S = 0.2
WAITS = Sign(ticks=1, step=3, phase=UPDATE, waits=True)


def beat(sign: Sign, process: Process | None = None) -> str:
    """What a rank that is in this process, or in the given one, tells of itself."""
    return json.dumps({**asdict(sign), "beat": 1, "process": asdict(process or Process.here())})


class Alone:
    """Rank `rank` of `world`, its store, and the reports of the ends that its pulse makes."""

    def __init__(self, store: Any, world: int, clock: StepClock, bounds: Bounds, rank: int = 0) -> None:
        self.ends: queue.SimpleQueue[Report] = queue.SimpleQueue()
        self.said: list[str] = []
        self.clock = clock
        self.pulse = Pulse(store, rank, world, clock, bounds, self.ends.put, self.said.append)

    def wait_until_known(self, rank: int, what: str) -> None:
        """Until this is told of that rank."""
        pause, deadline = threading.Event(), time.monotonic() + PATIENCE_S
        while not getattr(self.pulse.view().signs[rank], what):
            assert time.monotonic() < deadline, f"nothing is heard of rank {rank}"
            pause.wait(0.01)

    def end(self) -> Report:
        """The next end that the pulse makes; fails where there is none."""
        return self.ends.get(timeout=PATIENCE_S)


@contextmanager
def alone(
    store: Any, world: int, clock: StepClock | None = None, bounds: Bounds | None = None, rank: int = 0
) -> Iterator[Alone]:
    """A pulse that ends with the test."""
    made = Alone(store, world, clock or StepClock(), bounds or Bounds(PATIENCE_S), rank)
    try:
        yield made
    finally:
        made.pulse.leave(Exit.OK, "")


def test_who_passes_a_deadline_later_hands_on_what_the_first_saw() -> None:
    """The slow rank 1 has ended by the same deadline and is heard of: it is named, and nobody blames the network."""
    said = f"the update of step 3 took longer than run.step_deadline_s, {STEP_S:g} s: rank 1 of 2 is slow: in a loop"
    store = HashStore()
    store.set("beat 1", beat(replace(WAITS, waits=False, ended=said, exit=int(Exit.RANK_SILENT))))
    with alone(store, 2, bounds=Bounds(PATIENCE_S, STEP_S)) as made:
        made.wait_until_known(1, "ended")
        made.clock.at(3, UPDATE)
        made.clock.wait()
        found = made.end()
    assert (found.exit, found.cause) == (Exit.RANK_SILENT, said)


def test_who_passes_a_deadline_after_another_ended_names_that_one() -> None:
    """Rank 1 has ended for a reason of its own: that is what the step took so long for."""
    store = HashStore()
    store.set("beat 1", beat(replace(WAITS, waits=False, ended="LookupError: x", exit=int(Exit.CRASHED))))
    with alone(store, 2, bounds=Bounds(PATIENCE_S, STEP_S)) as made:
        made.wait_until_known(1, "ended")
        made.clock.at(3, UPDATE)
        made.clock.wait()
        found = made.end()
    late = f"the update of step 3 took longer than run.step_deadline_s, {STEP_S:g} s: "
    assert found.cause == f"{late}rank 1 of 2 ended: LookupError: x; 1 waits"
