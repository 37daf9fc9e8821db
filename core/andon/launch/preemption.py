"""Signals that ask `andon train` to end, from its first moment to its last.

Until training begins a signal ends the command at once: `Interrupted` is raised in the main thread, once, so that
what was begun is taken back. From `begin` on signals are collected, until the trainer handles them itself; after `end`
they change nothing.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_HANGUP = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
"""The terminal was closed. `nohup` has it ignored, and the run is to go on then."""
PREEMPTION_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, *_HANGUP)
"""What asks a rank to end at its next step boundary, with a checkpoint."""


class Interrupted(BaseException):
    """A signal asked this command to end before training began. No `Exception`: nothing on the way may take it."""

    def __init__(self, signum: int) -> None:
        self.signum = signum
        super().__init__(signal.Signals(signum).name)


class _State:
    on = False  # handlers are installed
    ends = False  # a signal ends this process
    received: list[int] = []  # noqa: RUF012 - the one state of this process


def _note(signum: int, frame: FrameType | None) -> None:
    _State.received.append(signum)
    if _State.ends and len(_State.received) == 1:
        raise Interrupted(signum)


def heed() -> None:
    """Have the preemption signals end this process by `Interrupted` from now on (in the main thread only)."""
    _State.on = _State.ends = True
    shown = sys.unraisablehook

    def unraisable(found: sys.UnraisableHookArgs) -> None:
        # Raised in a destructor, where nothing can be raised: `begin` raises it again.
        if found.exc_type is not Interrupted:
            shown(found)

    sys.unraisablehook = unraisable
    for signum in PREEMPTION_SIGNALS:
        signal.signal(signum, _note)


def heeded() -> bool:
    """Whether this process handles signals until its very end."""
    return _State.on


def begin() -> None:
    """Training begins: signals are collected from now on. Raises `Interrupted` if one has come and was lost."""
    if _State.ends:
        _State.ends = False
        if _State.received:
            raise Interrupted(_State.received[0])


def end() -> None:
    """The command has ended: no signal changes its exit code any more."""
    _State.ends = False


@contextmanager
def collected() -> Iterator[None]:
    """Inside, signals are collected and do not end this process; only its main thread can have that.

    Signals of one kind that arrive at once count as one, as the system has it.
    """
    main = threading.current_thread() is threading.main_thread()
    before = {signum: signal.signal(signum, _note) for signum in PREEMPTION_SIGNALS} if main else {}
    if _note not in before.values():
        taken()  # signals that an earlier launch of this program did not look at any more
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)


def taken() -> list[int]:
    """The signals collected so far, in order; they are forgotten here."""
    found, _State.received = _State.received, []
    return found
