"""Imported last, by the fork server only: it then ends immediately when its launcher does, stopped or not.

An interpreter with torch, transformers and peft needs most of a second to tear down its modules. A reader of the
launcher's output waits for the fork server too, which holds the other end of the pipe. Ranks, which are forked from it
and run the same exit functions, are not affected.
"""

from __future__ import annotations

import atexit
import os

from andon.launch.context import bind_to_launcher

_SERVER = os.getpid()
atexit.register(lambda: os._exit(0) if os.getpid() == _SERVER else None)
bind_to_launcher()
