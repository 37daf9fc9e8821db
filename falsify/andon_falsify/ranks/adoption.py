"""Imported by the fork server of the ranks only. It makes the server the parent of every process that a rank orphans.

Without this, init would adopt such a process, and the suite could not find it. If the suite was killed, the server ends
at once and removes the suite's folder.
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
# The fork server waits for every child, and warns about children that it did not start.
warnings.filterwarnings("ignore", "forkserver: waitpid returned unexpected pid")


@atexit.register
def _leave() -> None:
    """Runs if the suite has gone without ending the server. Ranks inherit the handler, and must not run it."""
    if os.getpid() == _SERVER:
        shutil.rmtree(_FOLDER, ignore_errors=True)
        os._exit(0)
