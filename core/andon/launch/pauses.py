"""The time in which this process did not run: stopped, on a machine that slept, or without a CPU. It accuses nobody."""

from __future__ import annotations

import threading
import time
from collections import deque

_KEPT = 64
_SHARE = 0.25
"""A process that used less of a gap than this did not run in it; one that holds the interpreter in native code did."""


class Pauses:
    """Notes the gaps between looks at the clock that threads of this process take all the time.

    Until the first look there are none: time passes for a process that nobody watches, too.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._noted: deque[tuple[float, float]] = deque(maxlen=_KEPT)
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
            if now - last >= self._least_s and used_now - used < _SHARE * (now - last):
                self._noted.append((last, now))

    def ran_s(self, since: float) -> tuple[float, float]:
        """For how many seconds since then (`time.monotonic`) this process ran, and for how many it did not."""
        now = time.monotonic()
        self.look()
        with self._lock:
            lost = sum(min(end, now) - max(begin, since) for begin, end in self._noted if begin < now and end > since)
        return max(now - since - lost, 0.0), lost
