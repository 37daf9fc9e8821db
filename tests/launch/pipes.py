"""Named pipes between ranks and a test: lines as they come, and the end of the file when the last rank is gone."""

from __future__ import annotations

import os
import select
import threading
import time
from pathlib import Path

PATIENCE_S = 60.0  # what an orphan lives for ever is told from by; nothing that works takes a tenth of it


class Pipe:
    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        self._buffer = b""
        self._pause = threading.Event()

    def lines(self, count: int) -> list[list[str]]:
        """The next `count` lines, in words; fails where they do not come."""
        deadline = time.monotonic() + PATIENCE_S
        while self._buffer.count(b"\n") < count:
            if not self._read(deadline):
                self._pause.wait(0.01)  # all that opened it so far have ended; others may still come
        *found, self._buffer = self._buffer.split(b"\n", count)
        return [line.decode().split() for line in found]

    def wait_until_all_are_gone(self) -> None:
        """Return once every process that opened the pipe for writing (at least one has) has ended."""
        deadline = time.monotonic() + PATIENCE_S
        while self._read(deadline):
            pass

    def close(self) -> None:
        os.close(self._descriptor)

    def _read(self, deadline: float) -> bool:
        ready, _, _ = select.select([self._descriptor], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"nothing came through {self.path.name}: {self._buffer!r}"
        found = os.read(self._descriptor, 4096)
        self._buffer += found
        return bool(found)
