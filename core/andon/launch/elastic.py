"""Ranks whose number may change: generation after generation, each from the last accepted checkpoint (issue 5, item 3).

    result = launch_elastic(entry, payload_for, Sizing(Bounds(2, 4)), run_folder=folder, timeout_s=30)

No worker outlives its generation. A worker that dies is started again at the same size; an agent that is lost makes the
world smaller; another number is taken when somebody asks for it (`resizing`), at the next step boundary. What the
ranks train does not depend on their number, so neither do its bits.
"""

from __future__ import annotations

import math
import signal
import uuid
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from andon.console.exits import Exit
from andon.console.messages import say
from andon.launch import resizing
from andon.launch.fork_server import ServerFailed
from andon.launch.launcher import LaunchResult, exclusive, job_of, result_of, warm_up
from andon.launch.report import clear
from andon.launch.sizes import Bounds, Ended, Next, Sizing
from andon.launch.supervisor import Supervisor, Wake, Watched
from andon.launch.worker_agents import Crew
from andon.run.folder import RunFolder
from andon_contracts.liveness.process import Process

PayloadFor = Callable[[int, bool], Mapping[str, Any]]
"""The payload for so many workers; True: go on where an earlier generation ended."""


def launch_elastic(
    entry: str,
    payload_for: PayloadFor,
    sizing: Sizing,
    *,
    run_folder: Path,
    timeout_s: float,
    silence_s: float = math.inf,
) -> LaunchResult:
    """Run `entry` in as many rank processes as `sizing` allows, until it has ended for good.

    Begins with the most. Signals, deadlines and errors are those of `launcher.launch`; a worker that dies or an agent
    that is lost ends its generation, not the launch, as long as `sizing` says how to go on.
    """
    job = job_of(entry, {}, run_folder)
    with exclusive() as wake:
        warm_up()
        crew = Crew(job)
        try:
            return _Generations(crew, payload_for, sizing, run_folder, (timeout_s, silence_s), wake).run()
        except ServerFailed as error:
            return LaunchResult(error.ends_with, str(error))
        finally:
            crew.close()
            resizing.give_up(run_folder, None)


@dataclass
class _Generations:
    crew: Crew
    payload_for: PayloadFor
    sizing: Sizing
    run_folder: Path
    bounds: tuple[float, float]
    wake: Wake

    def run(self) -> LaunchResult:
        """Until a generation ends for good; its result."""
        workers, number = self.sizing.bounds.most, 0
        resizing.hide(self.run_folder)
        while True:
            number += 1
            self.crew.resize(workers)
            result, ended = self._generation(number)
            following = self.sizing.after(ended)
            if not following.workers:
                resizing.give_up(self.run_folder, ended.wanted)
                return _final(result, following)
            workers = following.workers
            if workers == len(self.crew.members) - 1 and result.first is not None and ended.wanted is None:
                self.crew.give_up(result.first.rank)  # the one that died again and again
            cause = f"{result.cause}; " if result.exit is not Exit.PREEMPTED else ""
            say(f"elastic: {cause}{following.why}; going on with {workers} workers from the last checkpoint")

    def _generation(self, number: int) -> tuple[LaunchResult, Ended]:
        from andon.launch.unix_store import StoreServer

        clear(self.run_folder)
        launch = uuid.uuid4().hex
        world = len(self.crew.members)
        with closing(StoreServer()) as store:
            self.crew.begin(store.address, launch, self.payload_for(world, number > 1))
            watched = Generation(self.crew, self.run_folder, self.sizing.bounds, number)
            seen = Supervisor(watched, self.wake, self.run_folder, *self.bounds, launch=launch).run()
        watched.hear_last()
        exits = self.crew.exits
        lost, leaving = self.crew.settle()
        result = result_of(self.run_folder, seen, exits, None, world, launch=launch)
        return result, self._ended(result, seen, watched, lost, leaving)

    def _ended(self, result: LaunchResult, seen: Watched, watched: Generation, lost: int, leaving: int) -> Ended:
        names = [path.name for path in RunFolder(self.run_folder).checkpoints.glob("step-*")]
        return Ended(
            exit=result.exit,
            agents=len(self.crew.members),
            lost=lost,
            leaving=leaving,
            wanted=watched.wanted,
            stopped=seen.asked_by != 0,
            checkpoint=max(names, default=""),
        )


def _final(result: LaunchResult, following: Next) -> LaunchResult:
    if not following.why:
        return result
    cause = f"{result.cause}; {following.why}" if result.cause else following.why
    return replace(result, exit=following.exit, cause=cause)


@dataclass
class Generation:
    """One world of workers, as the supervisor watches it; meanwhile another number may be asked for."""

    crew: Crew
    run_folder: Path
    bounds: Bounds
    number: int
    wanted: int | None = None
    pids: dict[int, int] = field(default_factory=dict)
    _workers: list[Process] = field(default_factory=list, init=False)
    _failed: bool = field(default=False, init=False)

    def look(self) -> None:
        """Hear the agents, and whoever asks for another number of workers; once one has failed, ask all to end."""
        self.crew.look()
        if not self.pids:
            self._meet()
        if not self._failed and any(code not in (Exit.OK, Exit.PREEMPTED) for code in self.crew.exits.values()):
            self._failed = True
            for worker in self._workers:
                worker.send(signal.SIGTERM)
        self._take(resizing.taken(self.run_folder))

    def hear_last(self) -> None:
        """What was asked for since the last look, once all workers have ended."""
        self._take(resizing.taken(self.run_folder))

    def _meet(self) -> None:
        self.pids = self.crew.pids
        if not self.pids:
            return
        found = [Process.of(pid) for pid in self.pids.values()]
        self._workers = [process for process in found if process is not None]
        members = enumerate(self.crew.members)
        shown = [resizing.AgentProcess(rank, member.pid, member.worker) for rank, member in members]
        resizing.show(self.run_folder, self.bounds, self.number, shown)

    @property
    def ending(self) -> bool:
        """Whether the workers shall end at their next step boundary, for the next generation."""
        return self.wanted is not None or any(member.leaving for member in self.crew.members)

    @property
    def done(self) -> bool:
        """Whether every worker's end is known."""
        return len(self.crew.exits) == len(self.crew.members)

    def _take(self, asked: str | None) -> None:
        if asked is None:
            return
        if not asked.isdecimal() or not self.bounds.least <= int(asked) <= self.bounds.most:
            say(f"elastic: {asked!r} workers were asked for; --workers {self.bounds} allows no such number")
        elif self.wanted is not None or int(asked) != len(self.crew.members):
            # The last one who asks is heeded, also with the present number: the workers may be ending already.
            self.wanted = int(asked)
