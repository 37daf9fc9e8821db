"""What an error means as the end of a rank: its exit code, one line, and the rest for the report."""

from __future__ import annotations

import time
import traceback
from dataclasses import replace

from andon.console.exits import Exit
from andon.console.problems import InputError
from andon.launch.report import Report
from andon_contracts.liveness.diagnosis import NOTICED
from andon_contracts.violation import Violation, consequence


def describe(error: BaseException, rank: int) -> Report:
    """The report of a rank that ended with this error."""
    text = str(error).strip()
    head = _headline(text)
    now = time.time()
    full = "".join(traceback.format_exception(error))
    if isinstance(error, InputError):
        return Report(rank, Exit.USAGE, cause=head, message=text, time=now)
    if isinstance(error, Violation):
        return Report(rank, Exit.VIOLATION, cause=head, clause=error.clause, step=error.step, message=full, time=now)
    if isinstance(error, SystemExit) and error.code in (None, 0):
        # Work that is done returns: whatever called this, a library or a callback, left it undone.
        return Report(rank, Exit.RANK_LOST, cause="left by sys.exit(0)", message=full, time=now, left=True)
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        code = code if 0 <= code <= 255 else Exit.CRASHED  # of 256 the system would make 0
        return Report(rank, code, cause=head or f"ended with exit code {code}", message=full, time=now)
    cause = f"{type(error).__name__}: {head}" if head else type(error).__name__
    stated = getattr(error, "ends_with", None)
    of_another = consequence(error)
    peer = stated if isinstance(stated, Exit) else None if of_another is None else Exit(NOTICED[of_another])
    return Report(rank, Exit.CRASHED if peer is None else peer, cause=cause, message=full, time=now)


def unguarded(error: Exception, rank: int) -> Report:
    """The end of a rank of which a guard failed by this error: nobody would see a deadline pass, or others end."""
    found = describe(error, rank)
    return replace(found, exit=Exit.CRASHED, cause=f"the watch over this rank failed: {found.cause}")


def _headline(text: str) -> str:
    """The first line of `text`, with the one after it where it only announces that: torch's compiler says so which
    error it met."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
