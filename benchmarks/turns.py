"""Jobs side by side on one machine whose clocks run one at a time: what `benchmarks.gpu_compare` and its jobs share.

Each job warms up, which compiles, beside the others; each of its rounds then waits until the others' have ended on all
of their ranks. So the rounds of all are interleaved, on devices that do nothing else. A job that nobody compares takes
its rounds at once.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

PORT, JOB = "ANDON_BENCHMARK_PORT", "ANDON_BENCHMARK_JOB"
"""Variables of a job's environment: the port of the store on this host, and the job's name in it."""
_PATIENCE = timedelta(minutes=10)


class Turns:
    """One rank of a job, waiting for its turns; of no effect outside a comparison."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._name = environment.get(JOB, "")
        port = environment.get(PORT)
        self._store = TCPStore("127.0.0.1", int(port), timeout=_PATIENCE) if port else None
        self._taken = 0

    def wait(self) -> None:
        """Return when it is this job's turn, on each of its ranks. The device must be at rest when this is called."""
        if self._store is None:
            return
        self._store.add(f"{self._name}/{self._taken}/resting", 1)
        self._store.wait([f"{self._name}/{self._taken}/goes"])
        self._taken += 1


class Conductor:
    """Who gives the turns."""

    def __init__(self) -> None:
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=_PATIENCE)

    def environment_of(self, job: str) -> dict[str, str]:
        """The variables that a process of `job` needs in its environment."""
        return {PORT: str(self._store.port), JOB: job}

    def rests(self, job: str, turn: int, ranks: int) -> bool:
        """Whether all `ranks` of `job` have come to wait for its `turn`, from 0 on."""
        return self._store.add(f"{job}/{turn}/resting", 0) == ranks

    def go(self, job: str, turn: int) -> None:
        """Let it have its `turn`."""
        self._store.set(f"{job}/{turn}/goes", "")
