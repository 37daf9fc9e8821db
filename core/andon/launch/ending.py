"""What an error means as the end of a rank: its exit code, one line, and the rest for the report."""

from __future__ import annotations

import time
import traceback

from andon.exits import Exit
from andon.launch.report import Report
from andon.problems import InputError
from andon_contracts.violation import Violation

_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused")
_SILENT = ("Timed out waiting", "Wait timeout", "timed out after", "Timed out after", "Socket Timeout")
_NETWORK_ERRORS = frozenset({"DistBackendError", "DistNetworkError", "DistStoreError"})


def describe(error: BaseException, rank: int) -> Report:
    """The report of a rank that ended with this error."""
    text = str(error).strip()
    head = text.splitlines()[0] if text else ""
    now = time.time()
    full = "".join(traceback.format_exception(error))
    if isinstance(error, InputError):
        return Report(rank, Exit.USAGE, cause=head, message=text, time=now)
    if isinstance(error, Violation):
        return Report(rank, Exit.VIOLATION, cause=head, clause=error.clause, step=error.step, message=full, time=now)
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        code = code if 0 <= code <= 255 else Exit.CRASHED  # of 256 the system would make 0
        return Report(rank, code, cause=head or f"ended with exit code {code}", message=full, time=now)
    cause = f"{type(error).__name__}: {head}" if head else type(error).__name__
    stated = getattr(error, "ends_with", None)
    peer = stated if isinstance(stated, Exit) else peer_exit(error)
    return Report(rank, Exit.CRASHED if peer is None else peer, cause=cause, message=full, time=now)


def peer_exit(error: BaseException) -> Exit | None:
    """Whether an error only says that another rank is lost or silent; None where it is this rank's own.

    Gloo raises a plain `RuntimeError` for a peer that is gone, so its text has to be read; torch's own network and
    store errors have types.
    """
    if type(error).__name__ not in _NETWORK_ERRORS and not _from_gloo(error):
        return None
    text = str(error)
    if any(phrase in text for phrase in _SILENT):
        return Exit.RANK_SILENT
    return Exit.RANK_LOST if any(phrase in text for phrase in _LOST) or not _from_gloo(error) else None


def _from_gloo(error: BaseException) -> bool:
    return type(error) is RuntimeError and "gloo" in str(error)
