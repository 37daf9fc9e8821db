"""Faults of one run's processes, drawn from a seed: what is done to whom at which step, and whether it happened."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .processes import processes_of, send
from .trainer import environment, steps_of

KILL, PAUSE, STOP, PREEMPT, RESIZE = "kill", "pause", "stop", "preempt", "resize"


@dataclass(frozen=True)
class Fault:
    """At `step` (updates in the ledger, repeated ones too) do `kind` to `victim`.

    `kind`: SIGKILL, SIGSTOP and SIGCONT after `seconds`, SIGSTOP for good, SIGTERM, or a request for `number` workers.
    `victim`: launcher, rank, or agent (of an elastic run); `number` says which of them.
    """

    step: int
    kind: str
    victim: str
    number: int
    seconds: float = 0.0

    def __str__(self) -> str:
        whom = f"{self.number} workers" if self.kind == RESIZE else self.victim
        whom += f" {self.number}" if self.victim != "launcher" and self.kind != RESIZE else ""
        return f"{self.kind} {whom}" + (f" {self.seconds:.2f} s" if self.kind == PAUSE else "") + f" at {self.step}"


@dataclass(frozen=True)
class Schedule:
    """One run: its number of workers (elastic: least and most), its faults in order, the workers it is healed on."""

    number: int
    workers: str
    faults: tuple[Fault, ...]
    heal: int

    @classmethod
    def draw(cls, seed: int, number: int, steps: int) -> Schedule:
        """The schedule of this number: every draw comes from (seed, number)."""
        draw = random.Random(f"schedule {seed} {number}")
        most, elastic = draw.randrange(2, 5), draw.random() < 0.5
        at = sorted(draw.sample(range(1, steps), draw.randrange(1, 4 if elastic else 3)))
        least = draw.randrange(1, most) if elastic else most
        faults = tuple(_fault(draw, step, least, most) for step in at)
        workers = f"{least}:{most}" if elastic else str(most)
        return cls(number, workers, faults, draw.randrange(1, 5))


def _fault(draw: random.Random, step: int, least: int, most: int) -> Fault:
    elastic = least < most
    kinds = [KILL, KILL, KILL, PAUSE, PAUSE, STOP, PREEMPT] + [RESIZE, RESIZE] * elastic
    kind = draw.choice(kinds)
    victims = ["rank", "rank", "launcher"] + ["agent", "agent"] * elastic
    victim = "rank" if kind == STOP else "launcher" if kind == PREEMPT else draw.choice(victims)
    number = draw.randrange(least, most + 1) if kind == RESIZE else draw.randrange(most)
    return Fault(step, kind, victim, number, draw.uniform(0.1, 2.0) if kind == PAUSE else 0.0)


def strike(fault: Fault, folder: Path, launcher: subprocess.Popen[Any]) -> bool:
    """Wait for its step and do it; whether it happened: False where the run had ended, or had no such process."""
    while steps_of(folder) < fault.step:
        if launcher.poll() is not None:
            return False
        time.sleep(0.003)
    if fault.kind == RESIZE:
        command = [sys.executable, "-m", "andon", "resize", str(folder), str(fault.number)]
        return subprocess.run(command, env=environment(), capture_output=True, check=False).returncode == 0
    pid = _pid(fault, folder, launcher)
    return pid != 0 and _signalled(pid, fault)


def _pid(fault: Fault, folder: Path, launcher: subprocess.Popen[Any]) -> int:
    """The victim; 0 where there is none."""
    found = [] if launcher.poll() is not None else processes_of(fault.victim, folder, launcher.pid)
    return found[fault.number % len(found)] if found else 0


def _signalled(pid: int, fault: Fault) -> bool:
    signum = {KILL: signal.SIGKILL, PREEMPT: signal.SIGTERM}.get(fault.kind, signal.SIGSTOP)
    return send(pid, signum, pause_s=fault.seconds if fault.kind == PAUSE else 0.0) is not None
