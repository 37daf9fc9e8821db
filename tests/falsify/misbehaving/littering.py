"""A right loop that starts a process, in a session of its own, and forgets it."""

from __future__ import annotations

import subprocess

from andon_falsify.peers.plain import PlainLoop
from andon_falsify.subjects.case import Case

COMMAND = ("sleep", "86399")
"""Known by its number, so that a test can look for it."""


def make(case: Case) -> PlainLoop:
    subprocess.Popen(COMMAND, start_new_session=True)
    return PlainLoop(case)
