"""Faults of one run's processes, drawn from a seed: what happens to which process at which step."""

from __future__ import annotations

import random
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .processes import family, ranks, send
from .run import steps_of

KILL, PAUSE, STOP, PREEMPT = "kill", "pause", "stop", "preempt"
_SIGNALS = {KILL: signal.SIGKILL, PAUSE: signal.SIGSTOP, STOP: signal.SIGSTOP, PREEMPT: signal.SIGTERM}


@dataclass(frozen=True)
class Fault:
    """After `step` updates in the ledger do `kind` to `victim`: the launcher, or the rank `number`.

    kind: SIGKILL; SIGSTOP, and SIGCONT after `seconds`; SIGSTOP alone; or SIGTERM.
    """

    step: int
    kind: str
    victim: str
    number: int
    seconds: float = 0.0

    def __str__(self) -> str:
        whom = self.victim + (f" {self.number}" if self.victim != "launcher" else "")
        return f"{self.kind} {whom}" + (f" {self.seconds:.2f} s" if self.kind == PAUSE else "") + f" at {self.step}"


@dataclass(frozen=True)
class Schedule:
    """One run: its number of workers, its `run.max_restarts`, its faults in order, the workers that resume it."""

    number: int
    workers: int
    restarts: int
    faults: tuple[Fault, ...]
    heal: int

    @classmethod
    def draw(cls, seed: int, number: int, steps: int) -> Schedule:
        """The schedule of this number. (seed, number) determines it."""
        draw = random.Random(f"schedule {seed} {number}")
        workers, restarts = draw.randrange(2, 5), draw.choice((0, 3))
        at = sorted(draw.sample(range(1, steps), draw.randrange(1, 4 if restarts else 3)))
        return cls(number, workers, restarts, tuple(_fault(draw, step, workers) for step in at), draw.randrange(1, 5))


def _fault(draw: random.Random, step: int, workers: int) -> Fault:
    kind = draw.choice([KILL, KILL, KILL, PAUSE, PAUSE, STOP, PREEMPT])
    victim = {STOP: "rank", PREEMPT: "launcher"}.get(kind) or draw.choice(["rank", "rank", "launcher"])
    return Fault(step, kind, victim, draw.randrange(workers), draw.uniform(0.1, 2.0) if kind == PAUSE else 0.0)


def strike(fault: Fault, folder: Path, launcher: subprocess.Popen[Any]) -> bool:
    """Wait for the step and cause the fault. Returns False if the run has ended, or has no such process."""
    while steps_of(folder) < fault.step and launcher.poll() is None:
        time.sleep(0.003)
    found = ranks(launcher.pid) if fault.victim == "rank" else family(launcher.pid)[:1]
    if launcher.poll() is not None or not found:
        return False
    return send(found[fault.number % len(found)], _SIGNALS[fault.kind], pause_s=fault.seconds) is not None
