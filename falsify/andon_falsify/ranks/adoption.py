"""Imported by the fork server of the ranks, and by nobody else: what a rank leaves behind becomes its child.

Without that, a process whose rank has died would belong to init, and nobody could say whose it was. The server ends at
once, though it holds torch, and removes the suite's folder where the suite was killed.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import shutil
import warnings

from andon_falsify.ranks.server import FOLDER

_PR_SET_CHILD_SUBREAPER = 36
_SERVER = os.getpid()
_FOLDER = os.environ.pop(FOLDER)

ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
# The fork server waits for every child, and wonders about those that it did not start.
warnings.filterwarnings("ignore", "forkserver: waitpid returned unexpected pid")


def _leave() -> None:
    """The suite is gone and has not ended the server: it was killed. Ranks, forked from the server, are not meant."""
    if os.getpid() == _SERVER:
        shutil.rmtree(_FOLDER, ignore_errors=True)
        os._exit(0)


atexit.register(_leave)
