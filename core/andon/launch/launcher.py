"""Starts ranks on this machine through torch's elastic agent, and turns how they ended into one `Exit`.

    warm_up()                                # as early as possible: imports run beside what the command does
    result = launch("andon.training.entry:train_rank", payload, workers=4, run_folder=folder, timeout_s=30)

Ranks are forked from a forkserver that has imported the heavy packages once and computed nothing: forking a process
that ran torch code hangs, and spawning pays the imports once per rank. Importing this module imports no torch.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import re
import signal
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import TypeAlias

from andon.console.exits import Exit
from andon.launch.fork_server import ServerFailed, end_if_stopped, how_it_ended, require_sockets
from andon.launch.leftovers import claim_and_sweep
from andon.launch.orphan import LAUNCHER
from andon.launch.preemption import PREEMPTION_SIGNALS
from andon.launch.rank import Job
from andon.launch.report import UNSEEN, FirstCause, Report, clear, first_cause
from andon.launch.supervisor import AGENT_S, Supervisor, Wake, Watched

JSON: TypeAlias = "bool | int | float | str | Sequence[JSON] | Mapping[str, JSON] | None"

PRELOAD = ("torch", "torch.distributed", "transformers", "peft", "andon.launch.rank")
"""What the forkserver imports when nothing else is said."""

SINGLE_THREADED = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Set to 1 in every rank: ranks share the cores, and a forkserver must have no thread when it forks."""

_ENTRY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_one_at_a_time = threading.Lock()
_preload: list[str] = []


@dataclass(frozen=True)
class LaunchResult:
    """How a launch ended.

    `cause` is one line for a reader (empty on success), `exits` each rank's exit code as far as it was seen (negative:
    minus the signal), `first` the rank that failed first with its own report where it left one, `asked_by` the signal
    that asked this process to end (0: none did).
    """

    exit: Exit
    cause: str = ""
    exits: Mapping[int, int] = field(default_factory=dict)
    first: FirstCause | None = None
    asked_by: int = 0

    @property
    def report(self) -> Report | None:
        """What the rank that failed first had to say (all of a user's mistakes, a traceback)."""
        return None if self.first is None else self.first.report


def warm_up(preload: Sequence[str] = PRELOAD) -> None:
    """Start the forkserver, which imports `preload` while this process goes on; returns at once.

    Only the first call in a process decides what is imported; a later one starts a forkserver that has ended. Until a
    rank has its handlers, `PREEMPTION_SIGNALS` are blocked in it, and in the forkserver for good, so that a
    signal to the whole process group ends ranks at a step boundary instead of killing them through their parent. Nor
    does it kill multiprocessing's tracker of semaphores, which would otherwise be started again and print a traceback
    for each that it does not know. Raises `InputError` where the folder for temporary files takes no socket.
    """
    require_sockets()
    if not _preload:
        claim_and_sweep()
        _preload.extend(preload)
    multiprocessing.set_forkserver_preload(_preload)  # for a forkserver that was ended meanwhile, and is started again
    # A server looks for modules in the folder that it is started in first: a `torch.py` there is not to be run.
    given = dict.fromkeys(SINGLE_THREADED, "1") | {"PYTHONSAFEPATH": "1", LAUNCHER: str(os.getpid())}
    before = {name: os.environ.get(name) for name in given}
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, PREEMPTION_SIGNALS)
    try:
        os.environ.update(given)
        resource_tracker.ensure_running()  # it ignores SIGTERM and SIGINT, and unblocks them here; of others it dies
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
    payload: Mapping[str, JSON],
    *,
    workers: int,
    run_folder: Path,
    timeout_s: float,
    silence_s: float = math.inf,
) -> LaunchResult:
    """Run `entry` ("module:function", called with the payload, returns an `Exit`) in `workers` rank processes.

    Returns when all ranks have ended. Once one has failed, the others get SIGTERM, and SIGKILL within 2 s.
    `PREEMPTION_SIGNALS` to this process are forwarded to the ranks once (from the main thread); they have `timeout_s`
    seconds to end at a step boundary; a second SIGINT ends them at once. A rank that is stopped for more than
    `silence_s` is given up, unless another rank has given it up before. One launch at a time in a process.

    Raises ValueError for a malformed entry, fewer than 1 worker or a timeout that is not positive, TypeError for a
    payload that is not JSON, RuntimeError while another launch runs in this process.
    """
    job = job_of(entry, payload, run_folder)
    if workers < 1 or not timeout_s > 0:
        raise ValueError(f"at least 1 worker and a timeout above 0 s are needed, not {workers} and {timeout_s}")
    with exclusive() as wake:
        return _run(job, workers, run_folder, (timeout_s, silence_s), wake)


@contextmanager
def exclusive() -> Iterator[Wake]:
    """This process's one launch: what wakes its supervisor, with signals listened for. RuntimeError while one runs."""
    if not _one_at_a_time.acquire(blocking=False):
        raise RuntimeError("another launch runs in this process")
    wake = Wake()
    try:
        with wake.listening():
            yield wake
    finally:
        end_if_stopped()
        wake.close()
        _one_at_a_time.release()


def job_of(entry: str, payload: Mapping[str, JSON], run_folder: Path) -> Job:
    """What each rank is given. Raises ValueError for a malformed entry, TypeError for a payload that is not JSON."""
    if not _ENTRY.fullmatch(entry):
        raise ValueError(f'entry must be "module:function", not {entry!r}')
    environment = dict(os.environ)
    # One machine: gloo would otherwise look up the host's name, and listen where others can reach it.
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return Job(
        entry=entry,
        payload=json.dumps(payload).encode(),
        run_folder=str(run_folder),
        agent_pid=os.getpid(),
        environment=environment,
    )


def _run(job: Job, workers: int, run_folder: Path, bounds: tuple[float, float], wake: Wake) -> LaunchResult:
    warm_up()
    # Imports torch; beside the forkserver, which does the same.
    from andon.launch.agent import AgentThread

    clear(run_folder)
    run_id = uuid.uuid4().hex
    agent = AgentThread(job, workers, run_id, wake.ring)
    agent.start()
    seen = Supervisor(agent, wake, run_folder, *bounds, launch=run_id).run()
    if agent.done:
        # It lets go of torch's semaphores meanwhile. One that had been removed, but not yet been taken from the list of
        # multiprocessing's tracker when this process ends, would be called leaked, behind the last line of the command.
        agent.join(AGENT_S)
    exits = dict(agent.exits) if agent.done else {}
    return result_of(run_folder, seen, exits, agent.error, workers, launch=run_id)


def result_of(
    run_folder: Path,
    seen: Watched,
    exits: dict[int, int],
    error: BaseException | None,
    workers: int,
    *,
    launch: str,
) -> LaunchResult:
    """One exit from what the supervisor saw, what the agent read, and what the ranks of this launch reported."""
    found = _concluded(run_folder, seen, exits, error, workers, launch)
    return replace(found, asked_by=seen.asked_by)


def _concluded(
    run_folder: Path, seen: Watched, exits: dict[int, int], error: BaseException | None, workers: int, launch: str
) -> LaunchResult:
    # An agent that was left behind has told nothing: what was killed from here is known, the rest is in the reports.
    reported = {rank: Report.read(run_folder, rank, launch) is not None for rank in seen.died}
    untold = {
        rank: -signal.SIGKILL if rank in seen.killed else 0 if told else UNSEEN for rank, told in reported.items()
    }
    exits = untold | exits
    first = first_cause(run_folder, exits, died=seen.died, ended=seen.killed, launch=launch)
    if seen.verdict is not None:
        return LaunchResult(*seen.verdict, exits=exits, first=first)
    if first is not None:
        how = how_it_ended() if exits[first.rank] == UNSEEN else ""
        return LaunchResult(first.exit, f"{first.text}: {how}" if how else first.text, exits=exits, first=first)
    if isinstance(error, ServerFailed):
        return LaunchResult(error.ends_with, str(error), exits=exits)
    if error is not None:
        return LaunchResult(Exit.CRASHED, f"torch's elastic agent failed: {type(error).__name__}: {error}", exits=exits)
    if len(exits) != workers:
        return LaunchResult(Exit.RANK_LOST, f"{len(exits)} of {workers} ranks were seen to end", exits=exits)
    return LaunchResult(Exit.OK, exits=exits)
