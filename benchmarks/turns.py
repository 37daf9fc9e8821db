"""Jobs side by side on one machine whose clocks run one at a time: what `benchmarks.gpu_compare` and its jobs share.

Each job warms up, which compiles, beside the others; each of its rounds then waits for the others' to end. So the
rounds of all are interleaved, on devices that do nothing else. A job that nobody compares takes its rounds at once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore

PORT, JOB = "ANDON_BENCHMARK_PORT", "ANDON_BENCHMARK_JOB"
"""Variables of a job's environment: the port of the store on this host, and the job's name in it."""
_PATIENCE = timedelta(minutes=10)


class Turns:
    """One rank of a job, waiting for its turns; of no effect outside a comparison."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._name = environment.get(JOB, "")
        self._first = environment.get("RANK", "0") == "0"
        port = environment.get(PORT)
        self._store = TCPStore("127.0.0.1", int(port), timeout=_PATIENCE) if port else None
        self._taken = 0

    def wait(self) -> None:
        """Return when it is this job's turn, on each of its ranks. The device must be at rest when this is called."""
        if self._store is None:
            return
        if self._first:
            self._store.set(f"{self._name}/{self._taken}/rests", b"")
        self._store.wait([f"{self._name}/{self._taken}/goes"])
        self._taken += 1


class Conductor:
    """Who gives the turns."""

    def __init__(self) -> None:
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=_PATIENCE)

    def environment_of(self, job: str) -> dict[str, str]:
        """What a process of `job` has to have in its environment."""
        return {PORT: str(self._store.port), JOB: job}

    def rests(self, job: str, turn: int) -> bool:
        """Whether `job` has come to wait for its `turn`, from 0 on."""
        return bool(self._store.check([f"{job}/{turn}/rests"]))

    def go(self, job: str, turn: int) -> None:
        """Let it have its `turn`."""
        self._store.set(f"{job}/{turn}/goes", b"")


def last_object(text: str) -> dict[str, Any]:
    """The last line of `text` that is a JSON object. Raises `ValueError` if there is none."""
    for line in reversed(text.splitlines()):
        with suppress(json.JSONDecodeError):
            found = json.loads(line)
            if isinstance(found, dict):
                return found
    msg = "no figures were printed"
    raise ValueError(msg)
