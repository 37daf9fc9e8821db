"""The processes of a session: whatever a command that has one of its own has started, and left."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from tests.launch.pipes import PATIENCE_S


def wait_until_empty(session: int) -> None:
    """Return once no process of this session runs or is stopped; fails where one stays."""
    deadline, pause = time.monotonic() + PATIENCE_S, threading.Event()
    while any(_session(entry) == session for entry in Path("/proc").glob("[0-9]*/stat")):
        assert time.monotonic() < deadline, "it left processes"
        pause.wait(0.01)


def _session(stat: Path) -> int:
    try:
        state, _, _, session, *_ = stat.read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 0 if state in "ZX" else int(session)
