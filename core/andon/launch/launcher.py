"""Starts ranks on this machine, watches them, and reduces their ends to one `Exit`.

    warm_up()                                # as early as possible: imports run in the background
    result = launch("andon.training.start:train_rank", payload, workers=4, run_folder=folder, timeout_s=30)

Ranks are forked from a forkserver that has imported the heavy packages once and computed nothing: forking a process
that ran torch code hangs, and spawning repeats the imports in each rank. The launcher itself imports no torch, and all
of its waits for ranks and the fork server have timeouts.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import re
import signal
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from importlib.util import find_spec
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from andon.console.messages import Exit, say
from andon.launch import context as preemption
from andon.launch import fork_server
from andon.launch.context import LAUNCHER, PREEMPTION_SIGNALS, RUN_ID, STORE
from andon.launch.rank import serve
from andon.launch.report import UNSEEN, FirstCause, Report, clear, first_cause
from andon.launch.store_server import StoreServer
from andon_contracts.liveness.diagnosis import Patience, Symptoms, conclude, first_conclusion
from andon_contracts.liveness.process import STOPPED_BY, ConditionTimer, Process
from andon_contracts.violation import named_ranks

PRELOAD = ("torch", "torch.distributed", "transformers", "andon.launch.rank", "peft")
"""Default imports of the forkserver."""
_SINGLE_THREADED = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Set to 1 in every rank: ranks share the cores, and a forkserver must have no thread when it forks."""
_NOT_INHERITED = re.compile(r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_.*")
"""The rank variables of another launcher."""
_preload: list[str] = []
POLL_S = 0.05  # seconds between checks of the ranks; an end is noticed immediately
END_S = 1.5
"""Seconds that ranks have to end after another has failed, before SIGKILL. With polling it stays under 2 s."""
START_S = 300.0  # seconds until the ranks' processes must exist: imports from a cold disk may take a minute
STOPPED_S = 5.0  # seconds that the fork server may be stopped (SIGSTOP, a debugger) while ranks are started
EXITS_S = 2.0
"""Seconds that the fork server has to report the exit codes of ended ranks. A stopped one never does."""
KILLED_S = 5.0  # seconds after SIGKILL until a process must be gone, unless the kernel itself holds it
_SERVER_S = 0.5
"""Seconds until a fork server that was lost with its ranks must have ended: its pipes close a little earlier."""


def warm_up(preload: Sequence[str] = PRELOAD) -> None:
    """Start the forkserver, which imports `preload` in the background; returns immediately.

    Only the first call in a process decides what is imported; a later call starts the forkserver again if it has ended.
    `PREEMPTION_SIGNALS` stay blocked in the forkserver, and in a rank until it has its handlers. So a signal to the
    process group ends ranks at a step boundary instead of killing them through their parent. It also does not kill
    multiprocessing's resource tracker, which would restart and print a traceback for each semaphore that it does not
    know. Raises `InputError` if no socket can be created in the temporary folder.
    """
    fork_server.require_sockets()
    if find_spec("bitsandbytes"):  # peft imports it, and it initialises CUDA: forked ranks could use no GPU then
        preload = [name for name in preload if name.partition(".")[0] != "peft"]
    if not _preload:
        fork_server.claim_and_sweep()
        _preload.extend(preload)
    multiprocessing.set_forkserver_preload(_preload)  # for a forkserver that has ended and is started again
    # Otherwise a server imports a `torch.py` from the folder that it is started in.
    variables = dict.fromkeys(_SINGLE_THREADED, "1") | {"PYTHONSAFEPATH": "1", LAUNCHER: str(os.getpid())}
    before = {name: os.environ.get(name) for name in variables}
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, PREEMPTION_SIGNALS)
    try:
        os.environ.update(variables)
        resource_tracker.ensure_running()  # it ignores SIGTERM and SIGINT, and unblocks them here; others kill it
        signal.pthread_sigmask(signal.SIG_BLOCK, PREEMPTION_SIGNALS)
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def launch(
    entry: str,
    payload: Mapping[str, Any],
    *,
    workers: int,
    run_folder: Path,
    timeout_s: float,
    silence_s: float = math.inf,
) -> LaunchResult:
    """Run `entry` ("module:function", called with the payload, returns an `Exit`) in `workers` rank processes.

    Returns when all ranks have ended. After one has failed, the others get SIGTERM, and SIGKILL within 2 s. The first
    of `PREEMPTION_SIGNALS` to this process is forwarded to the ranks (only if called in the main thread). They then
    have `timeout_s` seconds to end at a step boundary; a second SIGINT kills them. A rank that is stopped for more than
    `silence_s` ends the launch, unless another rank gives it up first. One launch at a time in a process. Raises
    `TypeError` for a payload that is not JSON.
    """
    arguments = json.dumps(payload)
    try:
        with preemption.collected():
            warm_up()
            clear(run_folder)
            with closing(StoreServer()) as store:
                run_id = uuid.uuid4().hex
                job = (entry, arguments, str(run_folder), _environment(workers, run_id, store.address))
                context = multiprocessing.get_context("forkserver")
                ranks = [context.Process(target=serve, args=(*job, rank)) for rank in range(workers)]
                return Supervisor(ranks, run_folder, timeout_s, silence_s, launch=run_id).run()
    finally:
        fork_server.end_if_stopped()


def _environment(workers: int, run_id: str, store: str) -> dict[str, str]:
    # The forkserver's own variables date from its start.
    own = {name: value for name, value in os.environ.items() if not _NOT_INHERITED.fullmatch(name)}
    # One machine: otherwise gloo looks up the host's name and listens where others can reach it.
    defaults = {"GLOO_SOCKET_IFNAME": "lo", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    world = {"WORLD_SIZE": str(workers), "LOCAL_WORLD_SIZE": str(workers), "OMP_NUM_THREADS": "1"}
    return defaults | own | world | {RUN_ID: run_id, STORE: store, LAUNCHER: str(os.getpid())}


@dataclass(frozen=True)
class LaunchResult:
    """The result of a launch.

    cause: one line of text (empty on success). exits: the exit code of each rank (negative: minus the signal). first:
    the rank that failed first, with its report if it left one. asked_by: the signal that asked this process to end (0:
    none).
    """

    exit: Exit
    cause: str = ""
    exits: Mapping[int, int] = field(default_factory=dict)
    first: FirstCause | None = None
    asked_by: int = 0

    @property
    def report(self) -> Report | None:
        return None if self.first is None else self.first.report


class Supervisor:
    """Starts the ranks of one launch and watches them until all have ended or its timeouts are over.

        processes: by rank, not started. Signals are those of `preemption.collected`.
        timeout_s: how long a rank may take to its next step boundary and checkpoint after a signal asked it to end.
        silence_s: how long a rank may be stopped if no other rank gives it up first.
        launch: the id of the launch whose reports are read; empty: all.

    A thread starts the processes: the fork server answers only after its imports, and a signal must not wait for them.
    Ranks are registered together after all have been started, so a signal is forwarded to all or to none.
    """

    def __init__(
        self,
        processes: Sequence[ForkServerProcess],
        run_folder: Path,
        timeout_s: float,
        silence_s: float = math.inf,
        *,
        launch: str = "",
    ) -> None:
        self._processes, self._folder = processes, run_folder
        self._timeout_s, self._silence_s, self._launch = timeout_s, silence_s, launch
        self._started, self._abandoned, self._met = threading.Event(), False, False
        self._error: BaseException | None = None
        self._live: dict[int, Process] = {}
        self._exits: dict[int, int] = {}
        self._died: dict[int, float] = {}  # when each rank was first seen dead (seconds since the epoch)
        self._killed: set[int] = set()
        self._verdict: tuple[Exit, str] | None = None  # an end that no rank could report itself
        self._asked_by, self._interrupts = 0, 0
        self._stopped, self._server_stopped = ConditionTimer(END_S), ConditionTimer(END_S)
        self._kill_at, self._late = math.inf, ""
        """When to kill the ranks, and the reason to report; "" if another rank's end is the cause."""
        self._killed_at: float | None = None
        self._idle_since: float | None = None

    def run(self) -> LaunchResult:
        """Start the ranks and watch them until they end. If the watch itself fails, kill all ranks."""
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
        except BaseException as error:  # noqa: BLE001 - the main thread reports any error
            self._error = error
        self._started.set()
        if self._error is not None or self._abandoned:
            for process in self._processes:
                if process.pid is not None:
                    process.kill()

    def _look(self) -> None:
        pending = [rank for rank in range(len(self._processes)) if rank not in self._exits] if self._met else []
        connection.wait([self._processes[rank].sentinel for rank in pending], POLL_S)
        codes = {rank: self._processes[rank].exitcode for rank in pending}
        self._exits |= {rank: code for rank, code in codes.items() if code is not None}
        # Signals after exit codes: a signal to the process group precedes the ends that it causes.
        for signum in preemption.taken():
            self._handle(signum)
        if not self._started.is_set():
            # Kill a stopped fork server: `_start` would wait for it forever.
            server = fork_server.running()
            stopped = [server.pid] if server is not None and server.state() == "stopped" else []
            if max(self._server_stopped.update(stopped).values(), default=0.0) >= STOPPED_S:
                how = f"no rank could be started: the fork server did not run for {STOPPED_S:g} s, {STOPPED_BY}"
                self._verdict = (Exit.RANK_SILENT, how)
                fork_server.end_if_stopped()
        elif not self._met and self._error is None:
            self._met = True
            processes = {rank: Process.of(process.pid or 0) for rank, process in enumerate(self._processes)}
            self._live = {rank: process for rank, process in processes.items() if process is not None}
            for rank in processes.keys() - self._live.keys():
                self._note_death(rank)
            if self._interrupts > 1:
                self._kill(None)
            elif self._asked_by:
                self._forward(self._asked_by)
        self._conclude()
        if time.monotonic() >= self._kill_at:
            self._kill((Exit.RANK_SILENT, f"{named_ranks(self._live)} {self._late}") if self._late else None)

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
        states = {rank: "gone" if rank in self._exits else process.state() for rank, process in self._live.items()}
        stopped = self._stopped.update(rank for rank, state in states.items() if state == "stopped")
        # Other ranks, if any, give up a stopped rank first and report what they waited for.
        patience = Patience(stopped_s=self._silence_s + END_S)
        seen = {rank: Symptoms(state, stopped_s=stopped.get(rank, 0.0)) for rank, state in states.items()}
        conclusions = {rank: conclude(symptoms, patience) for rank, symptoms in seen.items()}
        for rank in first_conclusion(conclusions, ["died"])[1]:
            del self._live[rank]
            self._note_death(rank)
        late = first_conclusion(conclusions, ["stopped"])[1]
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
        exits = dict(self._exits)
        for rank in self._died.keys() - exits.keys():  # the fork server did not report its exit code
            reported = Report.read(self._folder, rank, self._launch) is not None
            exits[rank] = -signal.SIGKILL if rank in self._killed else 0 if reported else UNSEEN
        first = first_cause(self._folder, exits, died=self._died, ended=self._killed, launch=self._launch)
        if self._verdict is not None:
            code, cause = self._verdict
        elif first is not None:
            how = fork_server.how_it_ended(_SERVER_S) if exits[first.rank] == UNSEEN else ""
            code, cause = first.exit, f"{first.text}: {how}" if how else first.text
        elif isinstance(self._error, fork_server.ServerFailed):
            code, cause = Exit.RANK_LOST, str(self._error)
        elif self._error is not None:
            code, cause = Exit.CRASHED, f"no rank could be started: {type(self._error).__name__}: {self._error}"
        else:
            code, cause = Exit.OK, ""
        return LaunchResult(code, cause, exits, first, self._asked_by)
