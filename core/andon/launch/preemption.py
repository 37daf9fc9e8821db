"""Signals that ask `andon train` to end, from its first moment to its last.

Until training begins one of them ends the command at once: `Interrupted` is raised in the main thread, once, so that
what was begun is taken back. From `begin` on they are noted, until whoever trains listens by itself; what comes when
all has ended changes nothing any more.
"""

from __future__ import annotations

import signal
import sys
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


class _Heeding:
    """What this process does on signals: `on` once it heeds them, `ends` while one ends it, `asked` those that came."""

    def __init__(self) -> None:
        self.on, self.ends = False, False
        self.asked: list[int] = []

    def take(self, signum: int, frame: FrameType | None) -> None:
        """The handler."""
        self.asked.append(signum)
        if self.ends and len(self.asked) == 1:
            raise Interrupted(signum)


_heeding = _Heeding()


def heed() -> None:
    """Have the preemption signals end this process by `Interrupted` from now on (in the main thread only)."""
    _heeding.on = _heeding.ends = True
    shown = sys.unraisablehook

    def unraisable(found: sys.UnraisableHookArgs) -> None:
        # Raised where nothing can be: in a destructor. It is raised again by `begin`.
        if found.exc_type is not Interrupted:
            shown(found)

    sys.unraisablehook = unraisable
    for signum in PREEMPTION_SIGNALS:
        signal.signal(signum, _heeding.take)


def heeded() -> bool:
    """Whether this process heeds signals until its very end."""
    return _heeding.on


def begin() -> None:
    """Training begins: signals are noted from now on. Raises `Interrupted` where one has come and was lost."""
    if _heeding.ends:
        _heeding.ends = False
        if _heeding.asked:
            raise Interrupted(_heeding.asked[0])


def end() -> None:
    """The command has ended, however it did: no signal changes that any more."""
    _heeding.ends = False


def taken() -> list[int]:
    """The signals that were noted since training began, in their order; they are forgotten here."""
    found, _heeding.asked = _heeding.asked, []
    return found
