"""Imported by the fork server of the ranks, and by nobody else: what a rank leaves behind becomes its child.

Without that, a process whose rank has died would belong to init, and nobody could say whose it was.
"""

from __future__ import annotations

import ctypes
import warnings

_PR_SET_CHILD_SUBREAPER = 36

ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
# The fork server waits for every child, and wonders about those that it did not start.
warnings.filterwarnings("ignore", "forkserver: waitpid returned unexpected pid")
