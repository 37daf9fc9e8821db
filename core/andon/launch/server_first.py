"""Imported first, by the fork server only: it ends with its launcher, even while it imports.

Reports a failed import of the fork server in one line, not as a traceback.
"""

from __future__ import annotations

import os
import sys
from types import TracebackType

from andon.console.messages import say
from andon.launch.context import bind_to_launcher

_SERVER = os.getpid()


def _say_why(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if os.getpid() != _SERVER or os.environ.get("ANDON_TRACEBACK") == "1" or issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    reason = next(iter(str(error).splitlines()), "")
    say(f"the process that ranks are forked from cannot import what they need: {kind.__name__}: {reason}")


sys.excepthook = _say_why
bind_to_launcher()
