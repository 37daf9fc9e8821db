"""The host's time that a watch adds to a loop."""

from __future__ import annotations

import time


class AddedTime:
    """Context manager that adds up the seconds of its `with` blocks, which must not be nested."""

    seconds = _start = 0.0

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._start
