"""Pools of ranks by backend and world size. No ports: ranks meet in a file.

Whoever does not answer in time is killed by pid.
"""

from __future__ import annotations

import os
import pickle
import re
import signal
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from andon_falsify.ranks import leftovers
from andon_falsify.ranks.rank import Answer, Berth, live
from andon_falsify.ranks.server import SERVER, RankProcess

DEADLINE_S = 90.0
START_S = 60.0
GRACE_S = 5.0
_GOING_S = 0.5
"""How long what a rank has started may take to end by itself when the case is over."""


@dataclass(frozen=True)
class _Rank:
    process: BaseProcess
    pipe: Connection
    berth: Berth


class RankPool:
    """`world` processes in the group of `backend`. After a failure they are replaced at the next request.

    deadline_s: how long a request may take; the ranks' own start may take `START_S`. grace_s: how long the other ranks
    have after one of them failed, and how long a rank has to leave. What ranks print goes to a file, of which an error
    quotes the end; what they leave in the folder for temporary files is theirs alone, and goes with them.
    """

    def __init__(
        self, world: int, deadline_s: float = DEADLINE_S, grace_s: float = GRACE_S, backend: str = "gloo"
    ) -> None:
        self.world = world
        self.backend = backend
        self._deadline_s = deadline_s
        self._grace_s = grace_s
        self._ranks: list[_Rank] = []
        self._server = 0
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, work: str, argument: Any) -> list[Answer]:
        """`work` (module:function) applied to `argument` on every rank; the answers by rank.

        A rank that raised, died, did not answer in time or left a process behind has an answer with the text of it.
        """
        answers: dict[int, Answer] = {} if self._ranks else self._start()
        if not answers:
            answers = self._ask(pickle.dumps((work, argument)))
        left = leftovers.settled(self._server, self.pids, _GOING_S)
        if left or not all(answer.usable for answer in answers.values()):
            before = self.pids
            self._end()
            left = leftovers.settled(self._server, before, _GOING_S)
            leftovers.end(left, self._grace_s)
            _name(left, before, answers)
        return [answers[rank] for rank in range(self.world)]

    @property
    def pids(self) -> list[int]:
        """The processes of the ranks, by rank; none before the first request and after a failure."""
        return [rank.process.pid for rank in self._ranks if rank.process.pid is not None]

    def _start(self) -> dict[int, Answer]:
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-", dir=SERVER.folder)
        for number in range(self.world):
            berth = Berth(number, self.world, os.getpid(), self._folder.name, self._deadline_s, self.backend)
            ours, theirs = Pipe()
            process = RankProcess(target=live, args=(berth, theirs), daemon=True)
            process.start()
            theirs.close()
            self._ranks.append(_Rank(process, ours, berth))
        self._server = leftovers.parent_of(self.pids[0])
        answers = self._collect({}, START_S)
        return {} if all(answer.usable for answer in answers.values()) else answers

    def _ask(self, request: bytes) -> dict[int, Answer]:
        answers: dict[int, Answer] = {}
        for number, rank in enumerate(self._ranks):
            try:
                rank.pipe.send_bytes(request)
            except OSError as error:
                answers[number] = Answer(error=f"the rank cannot be reached: {error}", usable=False)
        return self._collect(answers, self._deadline_s)

    def _collect(self, answers: dict[int, Answer], deadline_s: float) -> dict[int, Answer]:
        """Read until every rank has answered, or its time is over; a failure shortens the others' time."""
        began = time.monotonic()
        deadline = began + deadline_s
        while len(answers) < self.world:
            open_ = {rank.pipe: number for number, rank in enumerate(self._ranks) if number not in answers}
            ready = wait(list(open_), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                waited = time.monotonic() - began
                for number in open_.values():
                    stood = stack(self._ranks[number].berth.printed)
                    answers[number] = Answer(error=f"no answer in time ({waited:.0f} s); killed{stood}", usable=False)
            for pipe in ready:
                assert isinstance(pipe, Connection)
                answer = answers[open_[pipe]] = _read(self._ranks[open_[pipe]], self._grace_s)
                if not answer.usable:
                    deadline = min(deadline, time.monotonic() + self._grace_s)
        return answers

    def close(self) -> None:
        """End the ranks, and what they have left behind."""
        before = self.pids
        self._end()
        if before:
            leftovers.end(leftovers.settled(self._server, before, _GOING_S), self._grace_s)

    def _end(self) -> None:
        """A closed pipe is the ranks' sign to leave; who stays is killed."""
        for rank in self._ranks:
            rank.pipe.close()
        for rank in self._ranks:
            rank.process.join(self._grace_s)
            if rank.process.is_alive():
                rank.process.kill()
                rank.process.join()
        self._ranks.clear()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


class RankPools:
    """A pool for each backend and world size, started when it is first asked for.

    Use as a context manager, or call `close`.
    """

    def __init__(self, deadline_s: float = DEADLINE_S, grace_s: float = GRACE_S) -> None:
        self._pools: dict[tuple[str, int], RankPool] = {}
        self._deadline_s = deadline_s
        self._grace_s = grace_s

    def of(self, world: int, backend: str = "gloo") -> RankPool:
        """The pool of `world` ranks in the group of `backend`."""
        new = RankPool(world, self._deadline_s, self._grace_s, backend)
        return self._pools.setdefault((backend, world), new)

    def close(self) -> None:
        """End all ranks."""
        for pool in self._pools.values():
            pool.close()

    def __enter__(self) -> RankPools:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _read(rank: _Rank, grace_s: float) -> Answer:
    try:
        answer = pickle.loads(rank.pipe.recv_bytes())  # our own ranks wrote it
    except (EOFError, ConnectionResetError):
        rank.process.join(grace_s)
        error = f"the rank {_ending(rank.process.exitcode)} without an answer{tail(rank.berth.printed)}"
        return Answer(error=error, usable=False)
    except Exception as error:  # noqa: BLE001 -- an answer may be made of what only the subject can import
        return Answer(error=f"an answer that cannot be read: {type(error).__name__}: {error}", usable=False)
    assert isinstance(answer, Answer)
    return answer


def _ending(code: int | None) -> str:
    if code is None:
        return "closed its pipe"
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _name(left: list[leftovers.Stray], ranks: list[int], answers: dict[int, Answer]) -> None:
    """Enter what was left behind into the answer of the rank that it is from, or of the first."""
    for number, pid in enumerate(ranks):
        own = [stray for stray in left if stray.rank == pid or (number == 0 and stray.rank not in ranks)]
        if own:
            said = f"it left processes behind, now ended: {', '.join(map(str, own))}"
            before = answers[number].error
            error = f"{before}\n{said}" if before else said
            answers[number] = Answer(answers[number].value, error, usable=False)


_READ = 20_000
_SHOWN = 200
_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>.+)$', re.MULTILINE)
_NOT_THEIRS = ("-packages/", "/lib/python3", "<frozen", "andon_falsify/ranks/", "andon_falsify/loops/", "andon/launch/")


def tail(printed: Path) -> str:
    """`; its last output: ...` with the last line that the rank wrote, or "" if it wrote nothing."""
    lines = [line.strip() for line in _end_of(printed).splitlines() if line.strip()]
    return f"; its last output: {lines[-1][-_SHOWN:]}" if lines else ""


def stack(printed: Path) -> str:
    """`; it stood at train in FILE:LINE`: the innermost frame of the subject's own code, or "" if none was written."""
    for frame in _FRAME.finditer(_end_of(printed)):
        if not any(part in frame["file"] for part in _NOT_THEIRS):
            return f"; it stood at {frame['name']} in {frame['file']}:{frame['line']}"
    return ""


def _end_of(printed: Path) -> str:
    try:
        with printed.open("rb") as file:
            file.seek(max(0, printed.stat().st_size - _READ))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""
