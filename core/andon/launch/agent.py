"""Torch's elastic agent for the ranks of one host, in a thread of its own.

What torch 2.13 does, and what is made of it here:

- Its c10d rendezvous waits up to 0.3 s at random and opens two stores that listen on every interface. One host needs
  none of it: the agent has a store in its own memory, and its ranks meet in one behind a Unix socket (`unix_store`).
- It waits 30 s for the others once a rank has failed, whatever `shutdown_timeout` says, and its signal handlers raise
  in the middle of whatever runs. In a thread it installs none, and whoever started the thread (`supervisor`) has its
  own clock and ends the ranks; then torch's waits return at once.
- A function that exits with 0 instead of returning is waited for for ever (`rank.serve` returns). Where all have, the
  wait ends here; that they left no report tells what they did (`report.first_cause`).
- Of several ranks that fail within its polling interval it names the lowest, and of the others it keeps no exit code;
  these are read here, from the processes it holds.
- Its log lines cost 1.6 s the first time (the formatter imports torch's compiler).
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

from torch._C._distributed_c10d import HashStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from andon.launch.fork_server import starting
from andon.launch.rank import TRACEBACK, Job, serve
from andon.launch.unix_store import StoreServer

_LOOPBACK = "127.0.0.1"
_MONITOR_S = 0.05


class OneHost(RendezvousHandler):
    """The rendezvous of a world of one host: nobody to wait for, and a store that nobody else needs."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id

    def get_backend(self) -> str:
        """Its name in torch's events."""
        return "one host"

    @property
    def use_agent_store(self) -> bool:
        """No rank opens a port for a store."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """This host, alone; ranks are told of no port."""
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo(_LOOPBACK, 0))

    def is_closed(self) -> bool:
        """Never: it is thrown away with its launch."""
        return False

    def set_closed(self) -> None:
        """Nobody else could join."""

    def num_nodes_waiting(self) -> int:
        """Nobody else could join."""
        return 0

    def get_run_id(self) -> str:
        """The id of this launch."""
        return self._run_id

    def shutdown(self) -> bool:
        """There is nothing to end."""
        return True


class _Unredirected(LogsSpecs):
    """Ranks write to the launcher's own stdout and stderr, and torch leaves no files behind."""

    @property
    def root_log_dir(self) -> str:
        return os.devnull

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        for environment in envs.values():
            environment["TORCHELASTIC_ERROR_FILE"] = ""
        empty = dict.fromkeys(envs, "")
        return LogsDest(stdouts=dict(empty), stderrs=dict(empty), error_files=dict.fromkeys(envs, os.devnull))


class _Agent(LocalElasticAgent):
    """Torch's agent, which also says what it started and how all of it ended."""

    def __init__(self, spec: WorkerSpec, started: Callable[[dict[int, int]], None]) -> None:
        super().__init__(spec, logs_specs=_Unredirected(), start_method="forkserver")
        self._started = started

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        with starting():
            pids: dict[int, int] = super()._start_workers(worker_group)
        self._started(dict(pids))
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        # One that returned is kept until all have: a process that is gone by now returned nothing.
        if result.state is WorkerState.HEALTHY and len(self.exit_codes()) == worker_group.spec.local_world_size:
            return RunResult(state=WorkerState.SUCCEEDED)
        return result

    def exit_codes(self) -> dict[int, int]:
        """The exit code of each rank that has ended, as multiprocessing gives it; to be asked after `run`."""
        processes = getattr(getattr(self._pcontext, "_pc", None), "processes", [])
        codes = {rank: process.exitcode for rank, process in enumerate(processes)}
        return {rank: code for rank, code in codes.items() if code is not None}


class AgentThread(threading.Thread):
    """Runs the agent of `workers` ranks that each serve `job`. A daemon: one that does not end is left behind.

    `pids` is empty until ranks run; `exits` and `error` are final once `done`. `changed` is called, from this thread,
    whenever one of these has changed.
    """

    def __init__(self, job: Job, workers: int, run_id: str, changed: Callable[[], None]) -> None:
        super().__init__(name="elastic-agent", daemon=True)
        self._job, self._workers, self._run_id, self._changed = job, workers, run_id, changed
        self.pids: dict[int, int] = {}
        self.ending = False
        self.exits: dict[int, int] = {}
        self.error: BaseException | None = None
        self.done = False

    def look(self) -> None:
        """Nothing to do: the thread looks for itself."""

    def run(self) -> None:
        """Torch's agent from its start to its end; an error of its own is kept in `error`."""
        agent: _Agent | None = None
        try:
            with _quiet(), closing(StoreServer()) as store:
                agent = _Agent(self._spec(store.address), self._note_start)
                agent.run()
        except BaseException as error:  # noqa: BLE001 - another thread has to hear of it, whatever it is
            self.error = error
        try:
            if agent is not None:
                self.exits = agent.exit_codes()
        except Exception as error:  # noqa: BLE001 - as above
            self.error = self.error or error
        finally:
            self.done = True
            self._changed()

    def _spec(self, store: str) -> WorkerSpec:
        return WorkerSpec(
            role="rank",
            local_world_size=self._workers,
            entrypoint=serve,
            args=(replace(self._job, store=store),),
            rdzv_handler=OneHost(self._run_id),
            max_restarts=0,
            monitor_interval=_MONITOR_S,
            local_addr=_LOOPBACK,
        )

    def _note_start(self, pids: dict[int, int]) -> None:
        self.pids = pids
        self._changed()


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch's own account of a failed rank off stderr: the report names the cause. See it by ANDON_TRACEBACK=1."""
    if os.environ.get(TRACEBACK) == "1":
        yield
        return
    loggers = [logging.getLogger(name) for name in ("torch.distributed.elastic", "torch.multiprocessing")]
    before = [logger.propagate for logger in loggers]
    silence = logging.NullHandler()
    for logger in loggers:
        logger.addHandler(silence)
        logger.propagate = False
    try:
        yield
    finally:
        for logger, propagate in zip(loggers, before, strict=True):
            logger.removeHandler(silence)
            logger.propagate = propagate
