"""The time that a watch adds to a loop: on a CPU by the host's clock, on a GPU by when the device comes to what.

A host that waits for a GPU mostly waits for the loop's own work, and a GPU that the host is far ahead of feels nothing
of what the host does meanwhile. What the loop feels is how long the device's stream takes from before the watch's first
launch to behind its last: its kernels, and its standstill where the host had nothing ready for it.
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress
from types import TracebackType

import torch

_KEPT = 256
"""Pairs of marks that are kept at most; a device that is farther behind is waited for."""


class AddedTime:
    """Seconds between the beginnings and the ends of `with` blocks, which do not stand in each other."""

    def __init__(self, device: torch.device | None) -> None:
        """device: a GPU whose time it is; None: the host's."""
        self._device = device
        self._seconds = 0.0
        self._began = 0.0
        self._marks: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._spare: list[torch.cuda.Event] = []
        self._first: torch.cuda.Event | None = None

    def __enter__(self) -> None:
        self._began = time.perf_counter()
        if self._device is not None and not torch.cuda.is_current_stream_capturing():
            self._first = self._marked()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._device is None:
            self._seconds += time.perf_counter() - self._began
            return
        if self._first is not None:
            self._marks.append((self._first, self._marked()))
            self._first = None
        while self._marks and (len(self._marks) > _KEPT or self._marks[0][1].query()):
            self._take()

    def _marked(self) -> torch.cuda.Event:
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _take(self) -> None:
        first, last = self._marks.popleft()
        if not last.query():
            last.synchronize()
        self._seconds += first.elapsed_time(last) / 1e3
        self._spare += first, last

    def seconds(self, *, wait: bool = True) -> float:
        """All so far. wait: for the device, to come to the last of it; else what it has not come to is not counted."""
        # A device that failed answers with its error, which is the loop's to tell; what is known is said.
        with suppress(RuntimeError):
            while self._marks and (wait or self._marks[0][1].query()):
                self._take()
        return self._seconds
