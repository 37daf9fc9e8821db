"""Pools of ranks, by backend and world size, and which rank's error is the cause of the others'.

Ranks meet in a file, so that no port is needed. A rank that misses its deadline is killed.
"""

from __future__ import annotations

import os
import pickle
import re
import signal
import tempfile
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from andon_falsify.ranks.processes import kill
from andon_falsify.ranks.rank import Answer, RankSpec, serve
from andon_falsify.ranks.server import SERVER, RankProcess, Stray

_DEADLINE_S = 90.0
_START_S = 60.0
_GRACE_S = 5.0
_LEFTOVERS_END_S = 0.5
"""How long the processes that a rank has started may take to end by themselves after the case."""
_READ = 20_000
_NOT_THEIRS = ("-packages/", "/lib/python3", "<frozen", "andon_falsify/ranks/", "andon_falsify/loops/", "andon/launch/")
_SYMPTOMS = ("gloo", "connection closed", "connection reset", "timed out waiting", "socket", "broken pipe")
"""What the other ranks of a group report when one of them is gone."""


class _Rank(NamedTuple):
    process: BaseProcess
    pipe: Connection
    printed: Path


class RankPool:
    """`world` processes in one group of `backend`. After a failure the next request starts new ones.

    deadline_s: for one request; ranks have a minute to start. grace_s: the time that the others have after one rank
    failed, and that a rank has to leave. What ranks print goes to a file, and an error quotes its end. Their folder for
    temporary files is their own, and is removed with them.
    """

    def __init__(
        self, world: int, deadline_s: float = _DEADLINE_S, grace_s: float = _GRACE_S, backend: str = "gloo"
    ) -> None:
        self.world = world
        self.backend = backend
        self.deadline_s = deadline_s
        self._grace_s = grace_s
        self._ranks: list[_Rank] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    @property
    def pids(self) -> list[int]:
        """By rank; none before the first request and after a failure."""
        return [rank.process.pid for rank in self._ranks if rank.process.pid is not None]

    def run(self, work: str, argument: Any) -> list[Answer]:
        """Call `work` (module:function) with `argument` on every rank. Returns the answers by rank.

        If a rank raised, died, did not answer in time or left a process behind, its answer has the text of the error.
        """
        answers: dict[int, Answer] = {} if self._ranks else self._start()
        if not answers:
            request = pickle.dumps((work, argument))
            for number, rank in enumerate(self._ranks):
                try:
                    rank.pipe.send_bytes(request)
                except OSError as error:
                    answers[number] = Answer(error=f"the rank cannot be reached: {error}")
            self._collect(answers, self.deadline_s)
        pids = self.pids
        if SERVER.strays(pids, _LEFTOVERS_END_S) or any(each.error for each in answers.values()):
            left = self._end()
            for number, pid in enumerate(pids):
                own = [str(stray) for stray in left if stray.rank == pid or (number == 0 and stray.rank not in pids)]
                if own:
                    text = f"it left processes behind, now ended: {', '.join(own)}"
                    lines = filter(None, (answers[number].error, text))
                    answers[number] = replace(answers[number], error="\n".join(lines))
        return [answers[rank] for rank in range(self.world)]

    def close(self) -> None:
        """End the ranks, and what they have left behind."""
        if self._ranks:
            self._end()

    def _start(self) -> dict[int, Answer]:
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-", dir=SERVER.folder)
        for number in range(self.world):
            spec = RankSpec(number, self.world, os.getpid(), self._folder.name, self.deadline_s, self.backend)
            ours, theirs = Pipe()
            process = RankProcess(target=serve, args=(spec, theirs))  # no daemon: its data loader may have workers
            process.start()
            theirs.close()
            self._ranks.append(_Rank(process, ours, spec.printed))
        answers: dict[int, Answer] = {}
        self._collect(answers, _START_S)
        return answers if any(answer.error for answer in answers.values()) else {}

    def _collect(self, answers: dict[int, Answer], deadline_s: float) -> None:
        began = time.monotonic()
        deadline = began + deadline_s
        while len(answers) < self.world:
            open_ = {rank.pipe: number for number, rank in enumerate(self._ranks) if number not in answers}
            ready = wait(list(open_), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                waited = time.monotonic() - began
                for number in open_.values():
                    text = f"no answer in time ({waited:.0f} s); killed{_place(self._ranks[number].printed)}"
                    answers[number] = Answer(error=text)
            for pipe in ready:
                assert isinstance(pipe, Connection)
                answer = answers[open_[pipe]] = self._read(self._ranks[open_[pipe]])
                if answer.error:
                    deadline = min(deadline, time.monotonic() + self._grace_s)

    def _read(self, rank: _Rank) -> Answer:
        try:
            answer: Answer = pickle.loads(rank.pipe.recv_bytes())  # our own rank wrote it
        except (EOFError, ConnectionResetError):
            rank.process.join(self._grace_s)
            lines = _end_of(rank.printed).strip().splitlines()
            last = f"; its last output: {lines[-1].strip()[-200:]}" if lines else ""
            return Answer(error=f"the rank {_ending(rank.process.exitcode)} without an answer{last}")
        except Exception as error:  # noqa: BLE001 -- an answer may need modules that only the subject can import
            return Answer(error=f"an answer that cannot be read: {type(error).__name__}: {error}")
        return answer

    def _end(self) -> list[Stray]:
        pids = self.pids
        for rank in self._ranks:
            rank.pipe.close()  # the sign to leave
        for rank in self._ranks:
            rank.process.join(self._grace_s)
            if rank.process.is_alive():
                rank.process.kill()
                rank.process.join()
        self._ranks.clear()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None
        left = SERVER.strays(pids, _LEFTOVERS_END_S)
        kill([stray.process for stray in left], self._grace_s)
        return left


class RankPools(AbstractContextManager["RankPools"]):
    """A pool for each backend and world size, started at its first request."""

    def __init__(self, deadline_s: float = _DEADLINE_S, grace_s: float = _GRACE_S) -> None:
        self._pools: dict[tuple[str, int], RankPool] = {}
        self._deadline_s = deadline_s
        self._grace_s = grace_s

    def of(self, world: int, backend: str = "gloo") -> RankPool:
        """The pool of `world` ranks in a group of `backend`."""
        new = RankPool(world, self._deadline_s, self._grace_s, backend)
        pool = self._pools.setdefault((backend, world), new)
        pool.deadline_s = self._deadline_s
        return pool

    def limit(self, deadline_s: float) -> None:
        """Set the deadline of the requests that follow."""
        self._deadline_s = deadline_s

    def close(self) -> None:
        """End all ranks."""
        for pool in self._pools.values():
            pool.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def root_cause(errors: Mapping[int, str]) -> str:
    """The error that most likely caused the others, such as `rank 1 was killed by SIGKILL without an answer`.

    A rank that died or raised is blamed first, then one that did not answer in time, then one that only reports
    that another is gone. Processes that ranks left behind are appended. Raises `ValueError` if `errors` is empty.
    """
    firsts = {rank: _first_line(text) for rank, text in sorted(errors.items())}
    rank = min(firsts, key=lambda each: _order(firsts[each]))
    own = _own_frames(errors[rank], ", in")
    at = f" (raised at {own[-1]['file']}:{own[-1]['line']} in {own[-1]['name']})" if own else ""
    left = [
        _named(other, line)
        for other in firsts
        for line in errors[other].splitlines()
        if "left processes behind" in line and line != firsts[rank]
    ]
    return "; ".join([_named(rank, firsts[rank] + at), *left])


def _order(first: str) -> int:
    if "no answer in time" in first:
        return 2
    return 3 if any(word in first.lower() for word in _SYMPTOMS) else 1


def _first_line(text: str) -> str:
    line = next((line for line in text.splitlines() if line.strip()), "an error without a text")
    line = line.removeprefix("LoopError: ")
    return line if len(line) <= 300 else f"{line[:300]}..."


def _named(rank: int, line: str) -> str:
    return f"rank {rank}{line.removeprefix('the rank')}" if line.startswith("the rank ") else f"rank {rank}: {line}"


def _own_frames(text: str, before_name: str) -> list[re.Match[str]]:
    """The frames in the subject's own code. before_name: ", in" in a traceback, " in" as faulthandler writes it."""
    frame = rf'^  File "(?P<file>[^"]+)", line (?P<line>\d+){before_name} (?P<name>.+)$'
    found = re.finditer(frame, text, re.MULTILINE)
    return [each for each in found if not any(part in each["file"] for part in _NOT_THEIRS)]


def _place(printed: Path) -> str:
    """`; it stood at train in FILE:LINE`: the innermost frame of the subject's own code, or "" if none was written."""
    own = _own_frames(_end_of(printed), " in")
    return f"; it stood at {own[0]['name']} in {own[0]['file']}:{own[0]['line']}" if own else ""


def _ending(code: int | None) -> str:
    if code is None:
        return "closed its pipe"
    if code >= 0:
        return f"ended with exit code {code}"
    named = -code in {each.value for each in signal.Signals}
    return f"was killed by {signal.Signals(-code).name}" if named else f"was killed by signal {-code}"


def _end_of(printed: Path) -> str:
    try:
        with printed.open("rb") as file:
            file.seek(max(0, printed.stat().st_size - _READ))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""
