"""The agent of one worker: a process that starts it, waits for it, and says how it ended (issue 5, item 3).

Torch's elastic agent is elastic in hosts, not in the workers of one, and its waits (30 s for a rendezvous to close, a
poll before each restart) are made for hosts; under `torchrun --nnodes MIN:MAX` they are the user's choice. Here an
agent has one worker, and whoever launched it tells it when to start the next. It is forked from the fork server and
computes nothing, so that it can fork.

A worker dies with its agent; an agent ends when its launcher does, whose end of the pipe then closes.
"""

from __future__ import annotations

import json
import os
import signal
import traceback
from collections.abc import Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from andon.exits import Exit
from andon.launch.orphan import bind_to_parent
from andon.launch.preemption import PREEMPTION_SIGNALS
from andon.launch.rank import Job, leave, serve

POLL_S = 0.05
"""Seconds between two looks for an order."""
_LEAVE = (signal.SIGTERM, signal.SIGUSR1)
"""What asks one agent to leave: the others go on without it, from a checkpoint of the next step boundary."""
_HEARD = (*PREEMPTION_SIGNALS, signal.SIGCHLD)


def be_agent(orders: Connection, job: Job) -> None:
    """Serve `orders` until the other end closes. An order is JSON: `variables` of a rank, and its `payload`.

    Answers, JSON too: `worker` with the pid of the one that was started, `exit` with its code (negative: minus the
    signal), `leaving` where a signal asked this agent to go.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
    _AgentLoop(orders, job).run()


class _AgentLoop:
    """One agent: at most one worker at a time."""

    def __init__(self, orders: Connection, job: Job) -> None:
        self._orders, self._job = orders, job
        self._worker = 0

    def run(self) -> None:
        """Until the launcher is gone; the worker, if one lives, dies with this process."""
        try:
            while True:
                heard = signal.sigtimedwait(_HEARD, POLL_S)
                if heard is not None and heard.si_signo in _LEAVE:
                    self._answer(leaving=True)
                self._reap()
                if self._orders.poll():
                    self._start(json.loads(self._orders.recv_bytes()))
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return

    def _start(self, order: Mapping[str, Any]) -> None:
        agent = os.getpid()
        self._worker = os.fork()
        if self._worker == 0:
            self._be_worker(order, agent)
        self._answer(worker=self._worker)

    def _be_worker(self, order: Mapping[str, Any], agent: int) -> NoReturn:
        """The forked process from here to its end: it must not come back into the agent's loop."""
        code: int = Exit.CRASHED
        try:
            self._orders.close()
            bind_to_parent(agent)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
            os.environ.update(order["variables"])
            code = serve(replace(self._job, payload=json.dumps(order["payload"]).encode()))
        except BaseException:  # noqa: BLE001 - what `serve` did not turn into a report is at least seen
            traceback.print_exc()
        leave(code)

    def _reap(self) -> None:
        if not self._worker:
            return
        pid, status = os.waitpid(self._worker, os.WNOHANG)
        if pid:
            self._worker = 0
            self._answer(exit=os.waitstatus_to_exitcode(status))

    def _answer(self, **said: object) -> None:
        self._orders.send_bytes(json.dumps(said).encode())
