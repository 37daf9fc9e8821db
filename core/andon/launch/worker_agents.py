"""The agents of one elastic launch: a process for each worker that starts it, waits for it, and says how it ended; and
the crew of them, as the launcher hires, orders, hears and lets them go (issue 5, item 3).

Torch's elastic agent is elastic in hosts, not in the workers of one, and its waits (30 s for a rendezvous to close, a
poll before each restart) are made for hosts; under `torchrun --nnodes MIN:MAX` they are the user's choice. Here an
agent has one worker, outlives it, and can be asked to leave, or lost, by itself: that is how the number of workers
changes. It is forked from the fork server and computes nothing, so that it can fork.

A worker dies with its agent; an agent ends when its launcher does, whose end of the pipe then closes.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any, NoReturn

from andon.console.exits import Exit
from andon.launch.fork_server import end_if_stopped, starting
from andon.launch.orphan import bind_to_parent
from andon.launch.preemption import PREEMPTION_SIGNALS
from andon.launch.rank import Job, leave, serve
from andon.launch.report import UNSEEN

POLL_S = 0.05
"""Seconds between two looks for an order."""
_LEAVE = (signal.SIGTERM, signal.SIGUSR1)
"""What asks one agent to leave: the others go on without it, from a checkpoint of the next step boundary."""
_HEARD = (*PREEMPTION_SIGNALS, signal.SIGCHLD)

ANSWER_S = 20.0
"""Seconds that an agent has to say which worker it started; one that does not is stopped, and lost."""
GONE_S = 1.0
"""Seconds that the fork server has to say that an agent is gone; one that is stopped never says it."""
LAST_WORD_S = 2.0
"""Seconds that an agent has to say how its worker ended, once that is gone."""


def be_agent(orders: Connection, job: Job) -> None:
    """Serve `orders` until the other end closes. An order is JSON: `variables` of a rank, its `payload`, its `store`.

    Answers, JSON too: `worker` with the pid of the one that was started, `exit` with its code (negative: minus the
    signal), `leaving` where a signal asked this agent to go.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
    _AgentLoop(orders, job).run()


class _AgentLoop:
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
            payload = json.dumps(order["payload"]).encode()
            code = serve(replace(self._job, payload=payload, store=order["store"]))
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


@dataclass
class Member:
    """One agent: its process, the pipe to it, and what it said of its worker in this generation."""

    process: ForkServerProcess
    pipe: Connection
    worker: int = 0
    exit: int | None = None
    leaving: bool = False
    lost: bool = False

    @property
    def pid(self) -> int:
        """The pid of the agent."""
        return self.process.pid or 0

    @property
    def ended_with(self) -> int | None:
        """How its worker ended; `UNSEEN` where the agent was lost before it could tell, None while it lives."""
        return UNSEEN if self.exit is None and self.lost else self.exit

    def hear(self) -> None:
        """Take what the agent has said; its end is a loss."""
        try:
            while not self.lost and self.pipe.poll():
                said: Mapping[str, Any] = json.loads(self.pipe.recv_bytes())
                self.worker = said.get("worker", self.worker)
                self.exit = said.get("exit", self.exit)
                self.leaving = said.get("leaving", self.leaving)
        except (EOFError, OSError):
            self.lost = True

    def order(self, variables: Mapping[str, str], payload: Mapping[str, Any], store: str) -> None:
        """Have it start a worker as the rank that the variables say; store: where it meets the others."""
        self.worker, self.exit = 0, None
        try:
            order = {"variables": variables, "payload": payload, "store": store}
            self.pipe.send_bytes(json.dumps(order).encode())
        except OSError:
            self.lost = True

    def end(self) -> None:
        """End it now, its worker with it, and wait until it is gone, or nobody says so."""
        self.process.kill()
        self.process.join(GONE_S)
        self.pipe.close()


@dataclass
class Crew:
    """All agents, in the order in which they were hired; the position in `members` is the rank. Not thread-safe."""

    job: Job
    members: list[Member] = field(default_factory=list)
    _ordered_at: float = field(default=0.0, init=False)

    def resize(self, count: int) -> None:
        """Hire or let go until there are `count`; the last hired go first.

        Raises `fork_server.ServerFailed` where none can be hired.
        """
        context = multiprocessing.get_context("forkserver")
        while len(self.members) > count:
            self.members.pop().end()
        while len(self.members) < count:
            ours, theirs = context.Pipe()
            process = context.Process(target=be_agent, args=(theirs, self.job), name="andon-agent", daemon=True)
            with starting():
                process.start()
            theirs.close()
            self.members.append(Member(process, ours))

    def begin(self, store: str, run_id: str, payload: Mapping[str, Any]) -> None:
        """Have every agent start its worker, as ranks of one world that meets in the store of this address."""
        world = str(len(self.members))
        self._ordered_at = time.monotonic()
        for rank, member in enumerate(self.members):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
            member.order(own | {"TORCHELASTIC_RUN_ID": run_id}, payload, store)

    def look(self) -> None:
        """Hear all agents; end one that has not started its worker in time."""
        late = time.monotonic() - self._ordered_at > ANSWER_S
        for member in self.members:
            member.hear()
            if late and not member.worker and not member.lost:
                member.process.kill()
                member.lost = True

    @property
    def pids(self) -> dict[int, int]:
        """The worker of each rank once all have started; of an agent that was lost before, the agent's own."""
        if not all(member.worker or member.lost for member in self.members):
            return {}
        return {rank: member.worker or member.pid for rank, member in enumerate(self.members)}

    @property
    def exits(self) -> dict[int, int]:
        """The exit code of each worker that has ended; `UNSEEN` where its agent was lost first."""
        told = {rank: member.ended_with for rank, member in enumerate(self.members)}
        return {rank: code for rank, code in told.items() if code is not None}

    def settle(self) -> tuple[int, int]:
        """After a generation: let go agents that are lost, silent or leaving; how many (lost, leaving)."""
        deadline = time.monotonic() + LAST_WORD_S
        for member in self.members:
            while member.exit is None and not member.lost:
                if not member.pipe.poll(max(0.0, deadline - time.monotonic())):
                    member.lost = True
                    break
                member.hear()
        lost = [member for member in self.members if member.lost]
        leaving = [member for member in self.members if member.leaving and not member.lost]
        for member in (*lost, *leaving):
            member.end()
            self.members.remove(member)
        return len(lost), len(leaving)

    def give_up(self, rank: int) -> None:
        """Let the agent of this rank go."""
        self.members.pop(rank).end()

    def close(self) -> None:
        """End all agents and their workers."""
        end_if_stopped()
        for member in self.members:
            with suppress(OSError):
                member.end()
        self.members.clear()
