"""Where a rank is in its training, and for how long, without the time in which its process did not run.

The main thread notes it for the price of reading a clock; the threads that guard the rank read it.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque

from andon_contracts.liveness.diagnosis import UPDATE, RankStatus

COMPILING = "compiling update"
"""The phase of the first update of a process that compiles: without a deadline, and not part of the usual time."""
_STEPS_KEPT, _GAPS_KEPT = 15, 64
_SHARE = 0.25
"""Of CPU time in a gap: a process that used less did not run. One whose native code holds the interpreter lock did."""


class Pauses:
    """The times since `begin` in which this process did not run: gaps between looks at the clock by any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._noted: deque[tuple[float, float]] = deque(maxlen=_GAPS_KEPT)
        self._least_s = 0.0
        self._looked: tuple[float, float] | None = None

    def begin(self, least_s: float) -> None:
        """Gaps of `least_s` or longer count from now on."""
        with self._lock:
            self._least_s, self._looked = least_s, (time.monotonic(), time.process_time())

    def look(self) -> None:
        """To be called several times in `least_s`, from any thread."""
        with self._lock:
            if self._looked is None:
                return
            last, used = self._looked
            self._looked = now, used_now = time.monotonic(), time.process_time()
            # If the process used its processor meanwhile, only the threads that look here waited.
            if now - last >= self._least_s and used_now - used < _SHARE * (now - last):
                self._noted.append((last, now))

    def ran_s(self, since: float) -> tuple[float, float]:
        """The seconds since then (`time.monotonic`) in which this process ran, and those in which it did not."""
        now = time.monotonic()
        self.look()
        with self._lock:
            gaps = [(begin, end) for begin, end in self._noted if begin < now and end > since]
            lost = sum((min(end, now) - max(begin, since) for begin, end in gaps), 0.0)
        return max(now - since - lost, 0.0), lost


class StepClock:
    """The clock of one rank. Only the thread that trains calls `at`, `wait` and `work` (before and after a collective).

    compiles: passes are compiled in the first update. pauses: kept by whoever guards the rank.
    """

    def __init__(self, *, compiles: bool = False) -> None:
        self._compiles_at: int | None = None
        self._compiled = not compiles
        self.pauses = Pauses()
        now = time.monotonic()
        self._noted = (0, 0, "start", False, now, now)  # ticks, step, phase, waits, since, phase began
        self._took: deque[float] = deque(maxlen=_STEPS_KEPT)

    def at(self, step: int, phase: str) -> None:
        """This rank begins `phase` of `step` (1 is the first)."""
        ticks, last, before, _, _, began = self._noted
        now = time.monotonic()
        if phase == UPDATE:
            if not self._compiled:
                self._compiled, self._compiles_at = True, step
            if step == self._compiles_at:
                phase = COMPILING
        if phase == UPDATE and before == UPDATE and step > last:
            self._took.append(now - began)
        # One assignment, so that other threads read all of it or nothing.
        self._noted = (ticks, step, phase, False, now, now if step != last or phase != before else began)

    def wait(self) -> None:
        self._tick(waits=True)

    def work(self) -> None:
        self._tick(waits=False)

    def _tick(self, *, waits: bool) -> None:
        ticks, step, phase, _, _, began = self._noted
        self._noted = (ticks + 1, step, phase, waits, time.monotonic(), began)

    def read(self) -> RankStatus:
        ticks, step, phase, waits, since, began = self._noted
        since_s, paused_s = self.pauses.ran_s(since)
        return RankStatus(ticks, step, phase, waits, since_s, self.pauses.ran_s(began)[0], paused_s=paused_s)

    def usual_s(self) -> float:
        """The median of the last steps, in seconds; 0 before the second step."""
        took = list(self._took)
        return statistics.median(took) if took else 0.0
