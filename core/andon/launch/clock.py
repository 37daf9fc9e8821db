"""Where a rank is in its training: noted by its main thread for the price of reading a clock, read by its pulse."""

from __future__ import annotations

import statistics
import time
from collections import deque
from dataclasses import dataclass

from andon.launch.pauses import Pauses

UPDATE = "update"
"""The phase in which steps are timed, and `run.step_deadline_s` holds."""
COMPILING = "compiling update"
"""The first update of a process that compiles its passes: no deadline holds there, and it tells no usual time."""
_KEPT = 15


@dataclass(frozen=True)
class Moment:
    """One look at a clock. ticks: how many collectives this rank has begun or left; all ranks count alike.

    waits: whether it is in one. since_s: for how long nothing was noted. phase_s: seconds since this phase of this
    step began. Neither counts paused_s: how long, since something was noted, this process did not run.
    """

    ticks: int
    step: int
    phase: str
    waits: bool
    since_s: float
    phase_s: float
    paused_s: float = 0.0


class StepClock:
    """The clock of one rank. `at`, `wait` and `work` are for the one thread that trains.

    compiles: whether passes are compiled in the first update. pauses: when this process did not run; its pulse keeps
    them.
    """

    def __init__(self, *, compiles: bool = False) -> None:
        self._compiles_at: int | None = None
        self._compiled = not compiles
        self.pauses = Pauses()
        now = time.monotonic()
        self._noted = (0, 0, "start", False, now, now)
        self._took: deque[float] = deque(maxlen=_KEPT)

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

    def read(self) -> Moment:
        """What was noted last; from any thread."""
        ticks, step, phase, waits, since, began = self._noted
        since_s, paused_s = self.pauses.ran_s(since)
        return Moment(ticks, step, phase, waits, since_s, self.pauses.ran_s(began)[0], paused_s)

    def usual_s(self) -> float:
        """The median of the last steps, in seconds; 0 before the second one."""
        took = list(self._took)
        return statistics.median(took) if took else 0.0
