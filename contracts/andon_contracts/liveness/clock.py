"""Measures how long a rank spends in each phase of its training, without the time in which its process did not run.

The main thread writes at the cost of reading a clock. The threads that guard the rank read.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque

from andon_contracts.liveness.diagnosis import UPDATE, RankStatus

COMPILING = "compiling update"
"""The phase of the first update of a process that compiles. It has no deadline and does not count as a usual update."""
_STEPS_KEPT, _GAPS_KEPT = 15, 64
_CPU_SHARE = 0.25
"""A process that used less CPU time than this share of a gap did not run. Native code that holds the GIL uses more."""


class Pauses:
    """The times since `start` in which this process did not run: gaps between two samples of the clock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._gaps: deque[tuple[float, float]] = deque(maxlen=_GAPS_KEPT)
        self._least_s = 0.0
        self._sampled: tuple[float, float] | None = None

    def start(self, least_s: float) -> None:
        """Count gaps of `least_s` or longer from now on. Call `sample` several times in `least_s`, from any thread."""
        with self._lock:
            self._least_s, self._sampled = least_s, (time.monotonic(), time.process_time())

    def sample(self) -> None:
        with self._lock:
            if self._sampled is None:
                return
            last, used = self._sampled
            self._sampled = now, used_now = time.monotonic(), time.process_time()
            # If the process used its CPU in the gap, it ran, and only the threads that sample waited.
            if now - last >= self._least_s and used_now - used < _CPU_SHARE * (now - last):
                self._gaps.append((last, now))

    def ran_s(self, since: float) -> tuple[float, float]:
        """The seconds since then (`time.monotonic`) in which this process ran, and those in which it did not."""
        now = time.monotonic()
        self.sample()
        with self._lock:
            paused = sum((max(min(end, now) - max(begin, since), 0.0) for begin, end in self._gaps), 0.0)
        return max(now - since - paused, 0.0), paused


class StepClock:
    """The clock of one rank. Only the thread that trains calls `at`, and `wait` and `work` around a collective.

    compiles: the first update compiles the passes. pauses: the heartbeat of the rank starts and samples it.
    """

    def __init__(self, *, compiles: bool = False) -> None:
        self._compiles_at: int | None = None
        self._compiled = not compiles
        self.pauses = Pauses()
        now = time.monotonic()
        self._state = (0, 0, "start", False, now, now)  # ticks, step, phase, waits, since, start of the phase
        self._durations: deque[float] = deque(maxlen=_STEPS_KEPT)

    def at(self, step: int, phase: str) -> None:
        """This rank begins `phase` of `step` (1 is the first)."""
        ticks, last, before, _, _, began = self._state
        now = time.monotonic()
        if phase == UPDATE:
            if not self._compiled:
                self._compiled, self._compiles_at = True, step
            if step == self._compiles_at:
                phase = COMPILING
        if phase == before == UPDATE and step > last:
            self._durations.append(now - began)
        # One assignment, so that other threads never read a mixture of two states.
        self._state = (ticks, step, phase, False, now, now if step != last or phase != before else began)

    def wait(self) -> None:
        self._tick(waits=True)

    def work(self) -> None:
        self._tick(waits=False)

    def _tick(self, *, waits: bool) -> None:
        ticks, step, phase, _, _, began = self._state
        self._state = (ticks + 1, step, phase, waits, time.monotonic(), began)

    def read(self) -> RankStatus:
        ticks, step, phase, waits, since, began = self._state
        since_s, paused_s = self.pauses.ran_s(since)
        return RankStatus(ticks, step, phase, waits, since_s, self.pauses.ran_s(began)[0], paused_s=paused_s)

    def usual_s(self) -> float:
        """The median duration of the last updates, in seconds; 0 before the second update."""
        durations = list(self._durations)
        return statistics.median(durations) if durations else 0.0
