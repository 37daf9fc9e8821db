"""Watches the ranks of one launch by a clock of its own: forwards signals, ends what does not end.

Torch's agent runs in another thread; nothing here waits for it longer than `AGENT_S`.
"""

from __future__ import annotations

import math
import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Protocol

from andon.console.exits import Exit
from andon.console.messages import say
from andon.launch.preemption import PREEMPTION_SIGNALS, taken
from andon.launch.report import Report
from andon_contracts.liveness.diagnosis import Patience, Symptoms, conclude, first_conclusion
from andon_contracts.liveness.process import STOPPED_BY, ConditionTimer, Process
from andon_contracts.violation import named_ranks

POLL_S = 0.05
"""Seconds between two looks at the ranks."""
END_S = 1.5
"""Seconds that ranks have to end once another has failed; then SIGKILL. With polling it stays under 2 s."""
START_S = 300.0
"""Seconds until the ranks' processes must exist: a cold disk may take a minute to import what they need."""
AGENT_S = 2.0
"""Seconds that torch's agent has to notice that all ranks are gone."""
KILLED_S = 5.0
"""Seconds after SIGKILL in which a process must be gone, unless the kernel itself holds it."""


class Agent(Protocol):
    """What is watched."""

    @property
    def pids(self) -> dict[int, int]:
        """The process of each rank; empty until all run."""
        ...

    @property
    def done(self) -> bool:
        """Whether it needs no more watching."""
        ...

    @property
    def ending(self) -> bool:
        """Whether the ranks shall end at their next step boundary, although no signal asked this process to end."""
        ...

    def look(self) -> None:
        """Called at every look at the ranks."""
        ...


@dataclass
class Watched:
    """What was seen: when each rank was first found dead (seconds since the epoch), which ranks were killed from here,
    `verdict`, an end that no rank could report itself, and `asked_by`, the signal that asked this process to end."""

    died: dict[int, float] = field(default_factory=dict)
    killed: set[int] = field(default_factory=set)
    verdict: tuple[Exit, str] | None = None
    asked_by: int = 0


class Wake:
    """A pipe that ends the supervisor's sleep: the agent's thread writes 0 into it, a signal its number."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._lock = threading.Lock()
        self._closed = False

    def ring(self) -> None:
        """Wake the supervisor; from any thread, and harmless after `close`."""
        with self._lock:
            # A full pipe wakes as well as one more byte would.
            if not self._closed:
                with suppress(BlockingIOError):
                    os.write(self._write, b"\0")

    def close(self) -> None:
        """Give the pipe back."""
        with self._lock:
            self._closed = True
            os.close(self._read)
            os.close(self._write)

    def wait(self, seconds: float) -> list[int]:
        """Sleep until rung or for so long; the preemption signals that came meanwhile, in their order."""
        if not select.select([self._read], [], [], seconds)[0]:
            return []
        return [number for number in os.read(self._read, 4096) if number in PREEMPTION_SIGNALS]

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Have `PREEMPTION_SIGNALS` ring instead of ending this process (possible in the main thread only).

        What was noted of them since training began rings at once.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        with _blocked():  # so that each is taken by one handler: the one before, or the one from now on
            descriptor = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
            before = {signum: signal.signal(signum, _do_nothing) for signum in PREEMPTION_SIGNALS}
            os.write(self._write, bytes(taken()))
        try:
            yield
        finally:
            with _blocked():
                signal.set_wakeup_fd(descriptor)
                for signum, handler in before.items():
                    signal.signal(signum, signal.SIG_DFL if handler is None else handler)


@contextmanager
def _blocked() -> Iterator[None]:
    """Signals that come meanwhile arrive at the end."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, PREEMPTION_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _do_nothing(signum: int, frame: FrameType | None) -> None:
    """The wake-up descriptor has the number already."""


class Supervisor:
    """Stays with one agent and its ranks until all have ended, or may no longer be waited for.

    timeout_s: how long a rank that was asked to end by a signal may take to its next step boundary and checkpoint.
    silence_s: how long a rank may be stopped, where no other one gives it up: the only rank of a world has nobody else.
    launch: the id of the launch whose reports are read; empty: all.
    """

    def __init__(
        self,
        agent: Agent,
        wake: Wake,
        run_folder: Path,
        timeout_s: float,
        silence_s: float = math.inf,
        *,
        launch: str = "",
    ) -> None:
        self._agent, self._wake, self._folder, self._timeout_s = agent, wake, run_folder, timeout_s
        self._launch = launch
        self._silence_s = silence_s
        self._stopped = ConditionTimer(END_S)
        self._all: tuple[int, ...] = ()
        self._live: dict[int, Process] = {}
        self._told_to_end = False
        self._interrupts = 0
        self._kill_at = float("inf")
        self._late = ""
        self._idle_since: float | None = None
        self._killed_at: float | None = None
        self._seen = Watched()

    def run(self) -> Watched:
        """Watch to the end; should watching itself fail, no rank is left behind."""
        started = time.monotonic()
        try:
            while not self._over(started):
                self._look()
        except BaseException:
            self._kill(None)
            raise
        return self._seen

    def _look(self) -> None:
        asked = self._wake.wait(POLL_S)
        self._agent.look()
        # A signal to the whole group came before what the agents and ranks did on it, however late we hear of it.
        for signum in asked + self._wake.wait(0):
            self._take(signum)
        self._meet_ranks()
        if self._agent.ending and self._all and not self._told_to_end and not self._seen.asked_by:
            self._told_to_end = True
            self._forward(signal.SIGUSR1)
        self._conclude()
        if time.monotonic() >= self._kill_at:
            self._kill((Exit.RANK_SILENT, f"{named_ranks(self._live)} {self._late}") if self._late else None)

    def _meet_ranks(self) -> None:
        if self._all or not self._agent.pids:
            return
        self._all = tuple(self._agent.pids)
        found = {rank: Process.of(pid) for rank, pid in self._agent.pids.items()}
        self._live = {rank: process for rank, process in found.items() if process is not None}
        for rank in found.keys() - self._live.keys():
            self._note_death(rank)
        if self._interrupts > 1:
            self._kill(None)
        elif self._seen.asked_by:
            self._forward(self._seen.asked_by)

    def _take(self, signum: int) -> None:
        self._interrupts += signum == signal.SIGINT
        if self._interrupts > 1:
            self._kill((Exit.RANK_LOST, "all ranks were killed: a second SIGINT asked for it"))
        if not self._seen.asked_by:
            self._seen.asked_by = signum
            again = "; a second one ends at once" if signum == signal.SIGINT else ""
            say(f"{signal.Signals(signum).name}: ending at the next step boundary{again}")
            if self._all:
                self._forward(signum)

    def _forward(self, signum: int) -> None:
        for process in self._live.values():
            process.send(signum)
        bound = self._timeout_s + END_S
        self._end_by(time.monotonic() + bound, f"did not end within {bound:g} s of {signal.Signals(signum).name}")

    def _end_by(self, deadline: float, late: str) -> None:
        """late: what is to be said of those that live then; empty where another one's end is the cause."""
        if deadline < self._kill_at:
            self._kill_at, self._late = deadline, late

    def _conclude(self) -> None:
        """By the table of all who look at ranks: who is dead, and who did not run for too long."""
        states = {rank: process.state() for rank, process in self._live.items()}
        stopped = self._stopped.update(rank for rank, state in states.items() if state == "stopped")
        # The others give it up first, where there are any, and say what they waited for.
        patience = Patience(stopped_s=self._silence_s + END_S)
        found = {
            rank: conclude(Symptoms(state, stopped_s=stopped.get(rank, 0.0)), patience)
            for rank, state in states.items()
        }
        for rank in first_conclusion(found, ["died"])[1]:
            del self._live[rank]
            self._note_death(rank)
        late = first_conclusion(found, ["stopped"])[1]
        if late and not self._seen.died and self._killed_at is None:
            self._kill((Exit.RANK_SILENT, f"{named_ranks(late)} did not run for {self._silence_s:g} s: {STOPPED_BY}"))

    def _note_death(self, rank: int) -> None:
        self._seen.died[rank] = time.time()
        report = Report.read(self._folder, rank, self._launch)
        code = None if report is None else report.exit
        if conclude(Symptoms("gone", announced=report is not None, exit=code), Patience()) == "left":
            return
        self._end_by(time.monotonic() + END_S + (self._timeout_s if code == Exit.PREEMPTED else 0.0), "")

    def _kill(self, verdict: tuple[Exit, str] | None) -> None:
        self._kill_at = float("inf")
        self._killed_at = self._killed_at or time.monotonic()
        if verdict is not None and self._seen.verdict is None:
            self._seen.verdict = verdict
        for rank, process in self._live.items():
            if process.send(signal.SIGKILL):
                self._seen.killed.add(rank)

    def _over(self, started: float) -> bool:
        now = time.monotonic()
        if self._agent.pids and not self._all:
            return False
        if self._live:
            if self._agent.done and self._killed_at is None:
                self._kill(None)
            return self._is_unkillable(now)
        if self._agent.done:
            return True
        if not self._all:
            return self._is_not_starting(now - started)
        self._idle_since = self._idle_since or now
        return now - self._idle_since > AGENT_S

    def _is_unkillable(self, now: float) -> bool:
        if self._killed_at is None or now - self._killed_at < KILLED_S:
            return False
        self._seen.verdict = (
            Exit.RANK_LOST,
            f"{named_ranks(self._live)} could not be killed: the kernel holds the process",
        )
        return True

    def _is_not_starting(self, waited: float) -> bool:
        if waited < START_S and self._interrupts < 2:
            return False
        self._seen.verdict = self._seen.verdict or (Exit.RANK_SILENT, f"no rank started within {START_S:g} s")
        return True
