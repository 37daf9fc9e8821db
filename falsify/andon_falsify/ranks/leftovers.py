"""Processes that ranks leave behind: descendants of the fork server that are no rank."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass

import psutil

_SHOWN = 60
_POLL_S = 0.02


@dataclass(frozen=True)
class Stray:
    """A process that outlived the case that started it. rank: the pid of the rank that it is from, 0 if unknown."""

    process: psutil.Process
    command: str
    rank: int

    def __str__(self) -> str:
        return f"{self.process.pid} ({self.command})"


def strays(server: int, ranks: Collection[int], wait_s: float) -> list[Stray]:
    """What the ranks with these pids, dead or alive, have left behind and is still there after `wait_s` seconds.

    A rank leads a session. Its descendants have it as an ancestor or have its session, or else the fork server has
    adopted them.
    """
    deadline = time.monotonic() + wait_s
    while (found := _strays(server, ranks)) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return found


def _strays(server: int, ranks: Collection[int]) -> list[Stray]:
    living = {child.pid for child in multiprocessing.active_children()} | set(ranks)
    found = []
    with suppress(psutil.NoSuchProcess):
        for process in psutil.Process(server).children(recursive=True):
            with suppress(psutil.NoSuchProcess, ProcessLookupError):  # it has just ended
                if process.pid in living or process.status() == psutil.STATUS_ZOMBIE:
                    continue
                above = [os.getsid(process.pid), *(parent.pid for parent in process.parents())]
                rank = next((pid for pid in above if pid in ranks), 0)
                if rank or living.isdisjoint(above):
                    words = " ".join(process.cmdline())
                    found.append(Stray(process, words if len(words) <= _SHOWN else f"{words[:_SHOWN]}...", rank))
    return found


def end(found: Collection[Stray], wait_s: float) -> None:
    """Kill them, and wait until they are gone, at most `wait_s` seconds."""
    for stray in found:
        with suppress(psutil.NoSuchProcess):
            stray.process.kill()
    psutil.wait_procs([stray.process for stray in found], wait_s)
