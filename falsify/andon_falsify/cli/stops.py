"""What ends a campaign before its time: Ctrl-C, SIGTERM, a deadline. Each is raised where the campaign is."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_UNKNOWN, _INTERRUPTED, _TERMINATED = 2, 128 + signal.SIGINT, 128 + signal.SIGTERM


class StoppedError(KeyboardInterrupt):
    """The campaign ends as it does by Ctrl-C. code: what the command ends with; None: what its verdicts say."""

    def __init__(self, why: str, code: int | None) -> None:
        super().__init__(why)
        self.code = code


def code_of(stop: KeyboardInterrupt, verdicts: int = _UNKNOWN) -> int:
    """What a command ends with that `stop` has ended, whose verdicts would end it with `verdicts`."""
    if not isinstance(stop, StoppedError):
        return _INTERRUPTED
    return verdicts if stop.code is None else stop.code


@contextmanager
def stops(deadline_s: float | None) -> Iterator[None]:
    """Raise `StoppedError` within for SIGTERM, and once `deadline_s` seconds are over.

    The first of the two is the last: what is ended and written because of it is not disturbed. Only the main thread is
    reached by signals; elsewhere this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGALRM)}

    def stop(number: int, _: Any) -> None:
        for each in held:
            signal.signal(each, signal.SIG_IGN)
        if number == signal.SIGTERM:
            raise StoppedError("ended by SIGTERM", _TERMINATED)
        raise StoppedError(f"the deadline of {deadline_s:g} s is over", None)

    for number in held:
        signal.signal(number, stop)
    signal.setitimer(signal.ITIMER_REAL, deadline_s or 0.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        for number, handler in held.items():
            signal.signal(number, handler)
