"""Where a rank is in its training, and when its process did not run: the time that accuses somebody, and that does not.

Noted by the main thread for the price of reading a clock, read by the thread that looks after the rank.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque

from andon_contracts.liveness.diagnosis import UPDATE, Told

COMPILING = "compiling update"
"""The first update of a process that compiles its passes: no deadline holds there, and it tells no usual time."""
_STEPS_KEPT, _GAPS_KEPT = 15, 64
_SHARE = 0.25
"""A process that used less of a gap than this did not run in it; one that holds the interpreter in native code did."""


class Pauses:
    """Notes the gaps between looks at the clock that threads of this process take all the time.

    Until the first look there are none: time passes for a process that nobody watches, too.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._noted: deque[tuple[float, float]] = deque(maxlen=_GAPS_KEPT)
        self._least_s = 0.0
        self._looked: tuple[float, float] | None = None

    def begin(self, least_s: float) -> None:
        """Look from now on. least_s: gaps that are shorter are none."""
        with self._lock:
            self._least_s, self._looked = least_s, (time.monotonic(), time.process_time())

    def look(self) -> None:
        """Look at the clock; from any thread. To be called several times in `least_s`."""
        with self._lock:
            if self._looked is None:
                return
            last, used = self._looked
            self._looked = now, used_now = time.monotonic(), time.process_time()
            # A process that used its processor meanwhile was not stopped: only the threads that look here waited.
            if now - last >= self._least_s and used_now - used < _SHARE * (now - last):
                self._noted.append((last, now))

    def ran_s(self, since: float) -> tuple[float, float]:
        """For how many seconds since then (`time.monotonic`) this process ran, and for how many it did not."""
        now = time.monotonic()
        self.look()
        with self._lock:
            gaps = [(begin, end) for begin, end in self._noted if begin < now and end > since]
            lost = sum((min(end, now) - max(begin, since) for begin, end in gaps), 0.0)
        return max(now - since - lost, 0.0), lost


class StepClock:
    """The clock of one rank. `at`, `wait` and `work` are for the one thread that trains.

    compiles: whether passes are compiled in the first update. pauses: when this process did not run; who looks
    after the rank keeps them.
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
        if phase == UPDATE and self._compiles(step):
            phase = COMPILING
        if phase == UPDATE and before == UPDATE and step > last:
            self._took.append(now - began)
        # One assignment: whoever reads sees all of it or nothing.
        self._noted = (ticks, step, phase, False, now, now if step != last or phase != before else began)

    def _compiles(self, step: int) -> bool:
        if not self._compiled:
            self._compiled, self._compiles_at = True, step
        return step == self._compiles_at

    def wait(self) -> None:
        """A collective begins."""
        ticks, step, phase, _, _, began = self._noted
        self._noted = (ticks + 1, step, phase, True, time.monotonic(), began)

    def work(self) -> None:
        """The collective is over."""
        ticks, step, phase, _, _, began = self._noted
        self._noted = (ticks + 1, step, phase, False, time.monotonic(), began)

    def read(self) -> Told:
        """What was noted last; from any thread."""
        ticks, step, phase, waits, since, began = self._noted
        since_s, paused_s = self.pauses.ran_s(since)
        return Told(ticks, step, phase, waits, since_s, self.pauses.ran_s(began)[0], paused_s=paused_s)

    def usual_s(self) -> float:
        """The median of the last steps, in seconds; 0 before the second one."""
        took = list(self._took)
        return statistics.median(took) if took else 0.0
