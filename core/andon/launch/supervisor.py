"""One launch from its launcher's side: starts the ranks, forwards signals, ends what does not end, and says why.

No torch here, and nothing waits for a rank or for the fork server without a bound.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from andon.console.exits import Exit
from andon.console.messages import say
from andon.launch import fork_server
from andon.launch.preemption import PREEMPTION_SIGNALS, taken
from andon.launch.report import UNSEEN, FirstCause, Report, first_cause
from andon_contracts.liveness.diagnosis import Patience, Symptoms, conclude, first_conclusion
from andon_contracts.liveness.process import STOPPED_BY, ConditionTimer, Process
from andon_contracts.violation import named_ranks

POLL_S = 0.05
"""Seconds between two looks at the ranks; one that ends is noticed at once."""
END_S = 1.5
"""Seconds that ranks have to end once another has failed; then SIGKILL. With polling it stays under 2 s."""
START_S = 300.0
"""Seconds until the ranks' processes must exist: a cold disk may take a minute to import what they need."""
STOPPED_S = 5.0
"""Seconds that the fork server may be stopped (SIGSTOP, a debugger) while ranks are started."""
EXITS_S = 2.0
"""Seconds that the fork server has to report the exit codes of ranks that are gone. One that is stopped never does."""
KILLED_S = 5.0
"""Seconds after SIGKILL in which a process must be gone, unless the kernel itself holds it."""
_SERVER_S = 0.5
"""Seconds in which a fork server whose ranks were lost with it must have ended: its pipes close a little before."""


@dataclass(frozen=True)
class LaunchResult:
    """How a launch ended.

    `cause` is one line for a reader (empty on success), `exits` the exit code of each rank (negative: minus the
    signal), `first` the rank that failed first with its own report if it left one, `asked_by` the signal that asked
    this process to end (0: none did).
    """

    exit: Exit
    cause: str = ""
    exits: Mapping[int, int] = field(default_factory=dict)
    first: FirstCause | None = None
    asked_by: int = 0

    @property
    def report(self) -> Report | None:
        return None if self.first is None else self.first.report


@contextmanager
def signal_pipe() -> Iterator[int]:
    """A pipe that receives the number of each preemption signal, which does not end this process meanwhile.

    Yields the end to read. It holds the signals collected since training began. In other threads than the main one
    nothing is ever written to it: only the main thread can handle signals.
    """
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    try:
        if threading.current_thread() is not threading.main_thread():
            yield reading
            return
        with _blocked_signals():  # so that each is handled once: by the handler before, or by the one from now on
            descriptor = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
            before = {signum: signal.signal(signum, lambda *_: None) for signum in PREEMPTION_SIGNALS}
            os.write(writing, bytes(taken()))
        try:
            yield reading
        finally:
            with _blocked_signals():
                signal.set_wakeup_fd(descriptor)
                for signum, handler in before.items():
                    signal.signal(signum, signal.SIG_DFL if handler is None else handler)
    finally:
        os.close(reading)
        os.close(writing)


@contextmanager
def _blocked_signals() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, PREEMPTION_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Supervisor:
    """Starts the ranks of one launch and stays with them until all have ended, or may no longer be waited for.

    processes: by rank, not started. signals: the end of a `signal_pipe` to read.
    timeout_s: how long a rank may take to its next step boundary and checkpoint after a signal asked it to end.
    silence_s: how long a rank may be stopped if no other rank gives it up; the only rank of a world has no other.
    launch: the id of the launch whose reports are read; empty: all.

    A thread starts the processes: the fork server answers only after its imports, and a signal must not wait for them.
    The ranks are met in one go, when all have been started, so a signal is forwarded to all or to none.
    """

    def __init__(
        self,
        processes: Sequence[ForkServerProcess],
        signals: int,
        run_folder: Path,
        timeout_s: float,
        silence_s: float = math.inf,
        *,
        launch: str = "",
    ) -> None:
        self._processes, self._signals, self._folder = processes, signals, run_folder
        self._timeout_s, self._silence_s, self._launch = timeout_s, silence_s, launch
        self._started, self._abandoned, self._met = threading.Event(), False, False
        self._error: BaseException | None = None
        self._live: dict[int, Process] = {}
        self._exits: dict[int, int] = {}
        self._died: dict[int, float] = {}
        """When each rank was first found dead (seconds since the epoch)."""
        self._killed: set[int] = set()
        self._verdict: tuple[Exit, str] | None = None
        """An end that no rank could report itself."""
        self._asked_by, self._interrupts = 0, 0
        self._stopped, self._server_stopped = ConditionTimer(END_S), ConditionTimer(END_S)
        self._kill_at, self._late = math.inf, ""
        """When the ranks are killed, and what to say of them then; "" if another rank's end is the cause."""
        self._killed_at: float | None = None
        self._idle_since: float | None = None

    def run(self) -> LaunchResult:
        """Start the ranks and watch them to the end. If watching itself fails, no rank is left behind."""
        began = time.monotonic()
        threading.Thread(target=self._start, name="andon-start", daemon=True).start()
        try:
            while not self._over(began):
                self._look()
        except BaseException:
            self._kill(None)
            raise
        return self._result()

    def _start(self) -> None:
        try:
            fork_server.start(self._processes)
        except BaseException as error:  # noqa: BLE001 - the main thread reports it, whatever it is
            self._error = error
        self._started.set()
        if self._error is not None or self._abandoned:
            for process in self._processes:
                if process.pid is not None:
                    process.kill()

    def _look(self) -> None:
        pending = [rank for rank in range(len(self._processes)) if rank not in self._exits] if self._met else []
        connection.wait([self._signals, *(self._processes[rank].sentinel for rank in pending)], POLL_S)
        codes = {rank: self._processes[rank].exitcode for rank in pending}
        self._exits |= {rank: code for rank, code in codes.items() if code is not None}
        # Signals after exit codes: a signal to the whole group came before the ends that it caused.
        with suppress(BlockingIOError):
            for signum in os.read(self._signals, 4096):
                if signum in PREEMPTION_SIGNALS:
                    self._handle(signum)
        if not self._started.is_set():
            # A fork server that is stopped is ended: nothing else would, and `_start` waits for its answer.
            server = fork_server.running()
            stopped = [server.pid] if server is not None and server.state() == "stopped" else []
            if max(self._server_stopped.update(stopped).values(), default=0.0) >= STOPPED_S:
                how = f"no rank could be started: the fork server did not run for {STOPPED_S:g} s, {STOPPED_BY}"
                self._verdict = (Exit.RANK_SILENT, how)
                fork_server.end_if_stopped()
        elif not self._met and self._error is None:
            self._meet_ranks()
        self._conclude()
        if time.monotonic() >= self._kill_at:
            self._kill((Exit.RANK_SILENT, f"{named_ranks(self._live)} {self._late}") if self._late else None)

    def _meet_ranks(self) -> None:
        self._met = True
        for rank, process in enumerate(self._processes):
            found = Process.of(process.pid or 0)
            if found is not None:
                self._live[rank] = found
        for rank in set(range(len(self._processes))) - self._live.keys():
            self._note_death(rank)
        if self._interrupts > 1:
            self._kill(None)
        elif self._asked_by:
            self._forward(self._asked_by)

    def _handle(self, signum: int) -> None:
        self._interrupts += signum == signal.SIGINT
        if self._interrupts > 1:
            self._kill((Exit.RANK_LOST, "all ranks were killed: a second SIGINT asked for it"))
        if not self._asked_by:
            self._asked_by = signum
            again = "; a second one ends at once" if signum == signal.SIGINT else ""
            say(f"{signal.Signals(signum).name}: ending at the next step boundary{again}")
            if self._met:
                self._forward(signum)

    def _forward(self, signum: int) -> None:
        for process in self._live.values():
            process.send(signum)
        bound = self._timeout_s + END_S
        self._end_by(time.monotonic() + bound, f"did not end within {bound:g} s of {signal.Signals(signum).name}")

    def _end_by(self, deadline: float, late: str) -> None:
        if deadline < self._kill_at:
            self._kill_at, self._late = deadline, late

    def _conclude(self) -> None:
        """Find ranks that have died and ranks that are stopped, by the rules that ranks apply to each other."""
        states = {rank: "gone" if rank in self._exits else process.state() for rank, process in self._live.items()}
        stopped = self._stopped.update(rank for rank, state in states.items() if state == "stopped")
        # The other ranks give it up first, if there are any, and report what they waited for.
        patience = Patience(stopped_s=self._silence_s + END_S)
        seen = {rank: Symptoms(state, stopped_s=stopped.get(rank, 0.0)) for rank, state in states.items()}
        found = {rank: conclude(symptoms, patience) for rank, symptoms in seen.items()}
        for rank in first_conclusion(found, ["died"])[1]:
            del self._live[rank]
            self._note_death(rank)
        late = first_conclusion(found, ["stopped"])[1]
        if late and not self._died and self._killed_at is None:
            self._kill((Exit.RANK_SILENT, f"{named_ranks(late)} did not run for {self._silence_s:g} s: {STOPPED_BY}"))

    def _note_death(self, rank: int) -> None:
        self._died[rank] = time.time()
        report = Report.read(self._folder, rank, self._launch)
        code = None if report is None else report.exit
        if conclude(Symptoms("gone", announced=report is not None, exit=code), Patience()) == "left":
            return
        if code == Exit.PREEMPTED:
            self._end_by(time.monotonic() + END_S + self._timeout_s, "")
            return
        for process in self._live.values():
            process.send(signal.SIGTERM)
        self._end_by(time.monotonic() + END_S, "")

    def _kill(self, verdict: tuple[Exit, str] | None) -> None:
        self._kill_at = math.inf
        self._killed_at = self._killed_at or time.monotonic()
        self._verdict = self._verdict or verdict
        self._killed |= {rank for rank, process in self._live.items() if process.send(signal.SIGKILL)}

    def _over(self, began: float) -> bool:
        now = time.monotonic()
        if not self._met:
            if self._error is not None:
                return True
            if self._started.is_set() or (now - began < START_S and self._interrupts < 2):
                return False
            self._abandoned = True
            self._verdict = self._verdict or (Exit.RANK_SILENT, f"no rank started within {START_S:g} s")
            return True
        if self._live:
            if self._killed_at is None or now - self._killed_at < KILLED_S:
                return False
            how = f"{named_ranks(self._live)} could not be killed: the kernel holds the process"
            self._verdict = (Exit.RANK_LOST, how)
            return True
        self._idle_since = self._idle_since or now
        return len(self._exits) == len(self._processes) or now - self._idle_since > EXITS_S

    def _result(self) -> LaunchResult:
        """One exit from what was seen here and from what the ranks reported."""
        exits = dict(self._exits)
        for rank in self._died.keys() - exits.keys():  # the fork server did not report its exit code
            reported = Report.read(self._folder, rank, self._launch) is not None
            exits[rank] = -signal.SIGKILL if rank in self._killed else 0 if reported else UNSEEN
        first = first_cause(self._folder, exits, died=self._died, ended=self._killed, launch=self._launch)
        if self._verdict is not None:
            found, cause = self._verdict
        elif first is not None:
            how = fork_server.how_it_ended(_SERVER_S) if exits[first.rank] == UNSEEN else ""
            found, cause = first.exit, f"{first.text}: {how}" if how else first.text
        elif isinstance(self._error, fork_server.ServerFailed):
            found, cause = Exit.RANK_LOST, str(self._error)
        elif self._error is not None:
            found, cause = Exit.CRASHED, f"no rank could be started: {type(self._error).__name__}: {self._error}"
        else:
            found, cause = Exit.OK, ""
        return LaunchResult(found, cause, exits, first, self._asked_by)
