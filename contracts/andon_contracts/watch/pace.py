"""How often a watch reads the tensors of an update, so that it stays within its share of a step (`budget=`)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from statistics import median

import torch

FULL, LONGEST = 64, 64
"""The first `FULL` updates are read in full, later one in up to `LONGEST`. Each `FULL` updates set the interval."""
_CYCLE, _IN_A_ROW = 256, 3
"""Three updates in a row are read of each 256, and then another phase of the interval: what comes once in each epoch is
read at last, whatever the length of an epoch.
"""


class Pace:
    """Decides which updates are read in full. An update that is passed over exchanges only what the loop reported.

    It compares the time that a full update takes with the time of a step: of the host, without waiting for ranks and
    devices, and of the device, by events that are read when they are long over.

    The invariant: the decision depends on the number of the update and on values of all ranks. Ranks that decide
    differently would wait for each other in different exchanges.
    """

    def __init__(self, budget: float | None, device: torch.device | None) -> None:
        self.every = 1  # the interval: one in `every` updates is read in full
        self.full = self.passed_over = 0  # the number of updates that were read in full, and of those that were not
        self._budget, self._device = budget, device
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._marks = [(time.perf_counter(), 0.0, 0)]
        """At the opening, after `FULL` updates and after the last: the time, seconds of the watch, and updates."""
        self._spent = self._last = 0.0
        # On a CPU this thread computes the step, so its own time does not depend on other load.
        self._clock = time.thread_time if device is None else time.perf_counter
        self._new_window()

    def _new_window(self) -> None:
        self._costs: tuple[list[float], list[float]] = [], []
        """Seconds of the host for each update that was passed over, and for each that was read in full."""
        self._steps: list[float] = []  # seconds of each step. The median leaves out pauses, as for an evaluation.

    def reads(self, number: int) -> bool:
        """Whether the update with this number, 1 for the first of its optimizer under this watch, is read in full."""
        in_a_row = number <= FULL or number % _CYCLE < _IN_A_ROW
        return in_a_row or number % self.every == number // _CYCLE % self.every

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Time what the block queues on the device. Waits for nothing."""
        if self._device is None or self._budget is None:
            yield
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(torch.cuda.current_stream(self._device))
        yield
        end.record(torch.cuda.current_stream(self._device))
        self._events.append((begin, end))

    def updated(self, spent_s: float, added_s: float, *, full: bool) -> None:
        """An update ended. spent_s: the seconds of the host that the watch took so far; added_s: also with waits."""
        self.full, self.passed_over = self.full + full, self.passed_over + (not full)
        self._costs[full].append(spent_s - self._spent)
        now = self._clock()
        self._steps.append(now - self._last)
        self._spent, self._last, count = spent_s, now, self.full + self.passed_over
        self._marks[1 + (count > FULL) :] = [(time.perf_counter(), added_s, count)]

    def wanted(self, number: int, *, settled: bool) -> int:
        """The interval that this rank needs from the next update on; 0 if this is not the update to decide it.

        settled: the ranks' weights are equal after each update, so that rarer reads show the same. Otherwise 1.
        """
        if number % FULL or self._budget is None:
            return 0
        passed_over, full = self._costs
        # The first launches include compilation, and the last ones may not be over.
        events, self._events = self._events[len(self._events) // 2 :], []
        device_s = sum(begin.elapsed_time(end) for begin, end in events if end.query()) / 1e3
        every, steps = 1, self._steps
        if settled and full:
            light = median(passed_over) if passed_over else 0.0
            # Beside weights, gradient and two moments, the backward pass reads the raw gradients.
            extra = median(full) + 1.25 * 2 * device_s / len(full) - light
            allowed = self._budget * median(steps)
            # A loop of tiny steps cannot be watched within its budget. Rarer reads would not change that.
            while every < LONGEST and extra / every > max(allowed - light, allowed / 2):
                every *= 2
        self._new_window()
        return every

    def agree(self, wanted: Sequence[int]) -> None:
        """Adopt the longest interval that a rank needs. wanted: of all ranks."""
        self.every = max(wanted) or self.every

    def cost(self) -> list[str]:
        """The share of the loop's time and the milliseconds per step that the watch added: at first, then later."""
        spans = [[now - before for before, now in zip(*pair, strict=True)] for pair in pairwise(self._marks)]
        return [f"{100 * added / time_s:.1f} % of the time, {1000 * added / n:.3g} ms" for time_s, added, n in spans]

    def closing_line(self) -> str:
        if not self.passed_over:
            return ""
        of = f"{self.full} of {self.full + self.passed_over} updates, at last in 1 of {self.every}"
        what = f"weights, gradients, optimizer states, buffers and settings were read in {of}"
        return f"  budget: {what}; budget=None reads them in all"
