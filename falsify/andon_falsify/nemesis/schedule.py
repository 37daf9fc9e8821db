"""Faults of one run's processes, drawn from a seed: what is done to whom at which step, and whether it happened."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from andon_falsify.nemesis.processes import family, ranks, state_of
from andon_falsify.nemesis.trainer import environment, steps_of

KILL, PAUSE, STOP, PREEMPT, RESIZE = "kill", "pause", "stop", "preempt", "resize"
_STOPPED, _DEAD = ("T", "t"), ("", "Z", "X")
"""What the process table says of a process that is stopped, and of one that is killed."""
_SEEN_S = 5.0
"""How long a signal may take to show in `/proc`."""


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


def processes_of(victim: str, folder: Path, launcher: int) -> list[int]:
    """Launcher, ranks or agents of the run in `folder`, in order: those that descend from the launcher now."""
    if victim == "launcher":
        return [launcher]
    members = family(launcher)
    return [pid for pid in _listed(folder, victim) or ranks(members) if pid in members]


def _listed(folder: Path, victim: str) -> list[int]:
    """Workers or agents of an elastic run, by its own list; none where it is not one, or between generations."""
    try:
        agents = json.loads((folder / "reports" / "agents.json").read_text())["agents"]
    except FileNotFoundError:
        return []
    return [each["worker" if victim == "rank" else "agent"] for each in agents]


def _signalled(pid: int, fault: Fault) -> bool:
    signum = {KILL: signal.SIGKILL, PREEMPT: signal.SIGTERM}.get(fault.kind, signal.SIGSTOP)
    return send(pid, signum, pause_s=fault.seconds if fault.kind == PAUSE else 0.0) is not None


def send(pid: int, signum: signal.Signals, *, group: bool = False, pause_s: float = 0.0) -> str | None:
    """Send a signal to a process, or to its group, and SIGCONT `pause_s` seconds later; 0: never.

    What the process table then shows, in words, "" for a signal that does not show there; None where there was no such
    process, or the table does not show it.
    """
    try:
        (os.killpg if group else os.kill)(pid, signum)
    except ProcessLookupError:
        return None
    if signum not in (signal.SIGKILL, signal.SIGSTOP):
        return ""
    state = _shown(pid, _DEAD if signum == signal.SIGKILL else (*_STOPPED, *_DEAD))
    if state is None:
        return None
    seen = f"{'stopped' if state in _STOPPED else 'dead'} in the process table"
    return seen + (_continued(pid, pause_s) if pause_s else "")


def _continued(pid: int, pause_s: float) -> str:
    time.sleep(pause_s)
    try:
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        return f", gone before SIGCONT after {pause_s:g} s"
    return f", SIGCONT after {pause_s:g} s"


def _shown(pid: int, states: Sequence[str]) -> str | None:
    """The state, once it is one of these; None where it is not in time."""
    deadline = time.monotonic() + _SEEN_S
    while time.monotonic() < deadline:
        if (state := state_of(pid)) in states:
            return state
        time.sleep(0.002)
    return None
