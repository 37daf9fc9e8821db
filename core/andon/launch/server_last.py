"""Imported last by the fork server, and by nobody else: it then ends at once when its launcher does, stopped or not.

An interpreter with torch, transformers and peft takes most of a second to take its modules down one by one, and a
reader of the launcher's output waits for the fork server too, which holds the other end.
"""

from __future__ import annotations

import atexit
import os

from andon.launch.orphan import bind_to_launcher

_SERVER = os.getpid()


def _leave() -> None:
    """End the fork server; ranks, which are forked from it and run the same exit functions, go on as they would."""
    if os.getpid() == _SERVER:
        os._exit(0)


atexit.register(_leave)
bind_to_launcher()
