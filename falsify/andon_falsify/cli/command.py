"""How a command that gives verdicts ends: its exit codes, and what may interrupt it."""

from __future__ import annotations

import os
import signal
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperCommand

from andon.console.exits import Exit
from andon.console.messages import OutputError, say

USAGE, INTERNAL = 64, 70
_UNKNOWN, _INTERRUPTED, _TERMINATED = 2, 128 + signal.SIGINT, 128 + signal.SIGTERM
_TRACEBACK = "ANDON_TRACEBACK"
_USAGE_ERROR, _SHOWN_BY_TYPER = typer.BadParameter.__mro__[1:3]
"""What typer raises for options that it cannot read, and the base class of everything that it prints itself."""


class FalsifyCommand(TyperCommand):
    """A command whose exit codes 1 and 2 are verdicts.

    Options that cannot be read end it with 64, an internal error with 70. If standard output cannot be written it ends
    with 2: no verdict is known to its caller.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """See click."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            if isinstance(error, _USAGE_ERROR):
                error.exit_code = USAGE  # type: ignore[attr-defined]
            raise

    def invoke(self, ctx: Any) -> Any:
        """See click."""
        try:
            return super().invoke(ctx)
        except (typer.Exit, typer.Abort, _SHOWN_BY_TYPER):  # type: ignore[misc]
            raise
        except KeyboardInterrupt as stop:
            say(str(stop) or "interrupted")
            raise typer.Exit(code_of(stop)) from None
        except OutputError as error:
            say(*map(str, error.problems))
            raise typer.Exit(int(Exit.USAGE)) from None
        except Exception as error:
            raise typer.Exit(internal(error)) from error


def internal(error: Exception) -> int:
    """Log an internal error; returns its exit code."""
    if os.environ.get(_TRACEBACK) == "1":
        traceback.print_exception(error)
    say(f"internal error: {type(error).__name__}: {error} (set {_TRACEBACK}=1 for the traceback)")
    return INTERNAL


class StoppedError(KeyboardInterrupt):
    """A signal or the deadline ended the campaign. code: the exit code; None: that of the verdicts so far."""

    def __init__(self, why: str, code: int | None) -> None:
        super().__init__(why)
        self.code = code


def code_of(stop: KeyboardInterrupt, verdicts: int = _UNKNOWN) -> int:
    """The exit code after `stop`. verdicts: that of the verdicts so far."""
    if not isinstance(stop, StoppedError):
        return _INTERRUPTED
    return verdicts if stop.code is None else stop.code


@contextmanager
def stops(deadline_s: float | None) -> Iterator[None]:
    """Raise `StoppedError` inside for SIGTERM, and after `deadline_s` seconds; whichever comes second is ignored.

    Without effect outside of the main thread, which alone receives signals.
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
