"""A signal of our own to the main thread, so that a rank that sleeps or reads raises what another rank pulled for.

A blocking call that Python made (a sleep, a read, a queue) returns when a handler raises. What native code blocks on
goes on, and the handler runs when Python does again.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable
from types import FrameType

_SIGNAL = signal.SIGRTMIN + 7
_heeding: list[Callable[[], None]] = []


def _handle(number: int, frame: FrameType | None) -> None:
    for heed in list(_heeding):
        heed()


def enlist(heed: Callable[[], None]) -> bool:
    """Let `interrupt` call `heed` in the main thread. False where that cannot be arranged.

    It cannot outside the main thread, and where somebody else uses the signal.
    """
    if threading.current_thread() is not threading.main_thread():
        return False
    if signal.getsignal(_SIGNAL) not in (signal.SIG_DFL, signal.SIG_IGN, _handle):
        return False
    signal.signal(_SIGNAL, _handle)
    _heeding.append(heed)
    return True


def dismiss(heed: Callable[[], None]) -> None:
    """No longer call `heed`; after the last one the signal is ignored, since one may still be under way."""
    if heed in _heeding:
        _heeding.remove(heed)
        if not _heeding and signal.getsignal(_SIGNAL) is _handle:
            # Only the main thread may; elsewhere the handler stays, and calls nobody.
            with contextlib.suppress(ValueError):
                signal.signal(_SIGNAL, signal.SIG_IGN)


def interrupt() -> None:
    """Let the main thread call those who enlisted, as soon as it runs Python."""
    main = threading.main_thread()
    if _heeding and main.ident is not None and main.is_alive():
        signal.pthread_kill(main.ident, _SIGNAL)


def alarm(seconds: float) -> None:
    """Let the system end this process by SIGALRM after that time: no thread has to run for it, no lock to be free."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, seconds)
