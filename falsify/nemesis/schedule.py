"""Faults of one run's processes, drawn from a seed: what is done to whom at which step, and whether it happened."""

from __future__ import annotations

import random
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .processes import processes_of, send
from .trainer import steps_of

KILL, PAUSE, STOP, PREEMPT = "kill", "pause", "stop", "preempt"


@dataclass(frozen=True)
class Fault:
    """At `step` (updates in the ledger, repeated ones too) do `kind` to `victim`.

    `kind`: SIGKILL, SIGSTOP and SIGCONT after `seconds`, SIGSTOP for good, or SIGTERM. `victim`: the launcher, or the
    rank of this `number`.
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
    """One run: its number of workers, its `run.max_restarts`, its faults in order, the workers it is healed on."""

    number: int
    workers: int
    restarts: int
    faults: tuple[Fault, ...]
    heal: int

    @classmethod
    def draw(cls, seed: int, number: int, steps: int) -> Schedule:
        """The schedule of this number: every draw comes from (seed, number)."""
        draw = random.Random(f"schedule {seed} {number}")
        workers, restarts = draw.randrange(2, 5), draw.choice((0, 3))
        at = sorted(draw.sample(range(1, steps), draw.randrange(1, 4 if restarts else 3)))
        return cls(number, workers, restarts, tuple(_fault(draw, step, workers) for step in at), draw.randrange(1, 5))


def _fault(draw: random.Random, step: int, workers: int) -> Fault:
    kind = draw.choice([KILL, KILL, KILL, PAUSE, PAUSE, STOP, PREEMPT])
    victim = {STOP: "rank", PREEMPT: "launcher"}.get(kind) or draw.choice(["rank", "rank", "launcher"])
    return Fault(step, kind, victim, draw.randrange(workers), draw.uniform(0.1, 2.0) if kind == PAUSE else 0.0)


def strike(fault: Fault, folder: Path, launcher: subprocess.Popen[Any]) -> bool:
    """Wait for its step and do it; whether it happened: False where the run had ended, or had no such process."""
    while steps_of(folder) < fault.step:
        if launcher.poll() is not None:
            return False
        time.sleep(0.003)
    found = [] if launcher.poll() is not None else processes_of(fault.victim, launcher.pid)
    if not found:
        return False
    signum = {KILL: signal.SIGKILL, PREEMPT: signal.SIGTERM}.get(fault.kind, signal.SIGSTOP)
    pause_s = fault.seconds if fault.kind == PAUSE else 0.0
    return send(found[fault.number % len(found)], signum, pause_s=pause_s) is not None
