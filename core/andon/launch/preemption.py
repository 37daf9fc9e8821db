"""Handles the signals that ask `andon train` to end, from the start of the command to its end.

Before training a signal ends the command immediately: `Interrupted` is raised once, in the main thread, so that partial
work is undone. From `begin` on, signals are collected until the trainer handles them itself. After `end` they change
nothing.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_HANGUP = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
"""Sent when the terminal is closed. Under `nohup` it is ignored, and the run must continue."""
PREEMPTION_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, *_HANGUP)
"""Signals that ask a rank to end at its next step boundary, with a checkpoint."""


class Interrupted(BaseException):
    """A signal asked this command to end before training. Not caught by `except Exception`, so nothing swallows it."""

    def __init__(self, signum: int) -> None:
        self.signum = signum
        super().__init__(signal.Signals(signum).name)


class _State:
    on = False  # handlers are installed
    ends = False  # a signal ends this process
    received: list[int] = []  # noqa: RUF012 - the state of this process


def _note(signum: int, frame: FrameType | None) -> None:
    _State.received.append(signum)
    if _State.ends and len(_State.received) == 1:
        raise Interrupted(signum)


def heed() -> None:
    """From now on the preemption signals raise `Interrupted`. Must be called in the main thread."""
    _State.on = _State.ends = True
    previous = sys.unraisablehook

    def unraisable(unraised: sys.UnraisableHookArgs) -> None:
        # Raised in a destructor, where Python discards errors: `begin` raises it again.
        if unraised.exc_type is not Interrupted:
            previous(unraised)

    sys.unraisablehook = unraisable
    for signum in PREEMPTION_SIGNALS:
        signal.signal(signum, _note)


def heeded() -> bool:
    """True after `heed`: this process then handles signals until it ends."""
    return _State.on


def begin() -> None:
    """Collect signals from now on. Raises `Interrupted` if one has arrived whose error was lost."""
    if _State.ends:
        _State.ends = False
        if _State.received:
            raise Interrupted(_State.received[0])


def end() -> None:
    """The command has ended: signals no longer change its exit code."""
    _State.ends = False


@contextmanager
def collected() -> Iterator[None]:
    """Context manager: collect signals instead of ending this process. Only the main thread can do this.

    The system merges signals of one kind that arrive at once.
    """
    main = threading.current_thread() is threading.main_thread()
    before = {signum: signal.signal(signum, _note) for signum in PREEMPTION_SIGNALS} if main else {}
    if _note not in before.values():
        taken()  # discard signals that an earlier launch in this process did not handle
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)


def taken() -> list[int]:
    """The signals collected so far, in order; they are then cleared."""
    received, _State.received = _State.received, []
    return received
