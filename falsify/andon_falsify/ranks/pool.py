"""Pools of ranks by world size. No ports: ranks meet in a file. Whoever does not answer in time is killed by pid."""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
import time
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from andon_falsify.ranks.rank import Answer, live

DEADLINE_S = 90.0
GRACE_S = 5.0
_PRELOADED = (
    "torch",
    "torch.distributed",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.bert.modeling_bert",
    "peft",
    "andon_falsify.ranks.duty",
)


class RankPool:
    """`world` processes in one gloo group. After a failure they are replaced at the next request.

    deadline_s: how long a request may take, the start of the ranks included; grace_s: how long the other ranks have
    after one of them failed, and how long a rank has to leave.
    """

    def __init__(self, world: int, deadline_s: float = DEADLINE_S, grace_s: float = GRACE_S) -> None:
        self.world = world
        self._deadline_s = deadline_s
        self._grace_s = grace_s
        self._context = multiprocessing.get_context("forkserver")
        # Imported once, by a server that starts no thread, so that a rank is there in milliseconds.
        self._context.set_forkserver_preload(list(_PRELOADED))
        self._ranks: list[tuple[BaseProcess, Connection]] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, work: str, argument: Any) -> list[Answer]:
        """`work` (module:function) applied to `argument` on every rank; the answers by rank.

        A rank that raised, died or did not answer in time has an answer with the text of it.
        """
        if not self._ranks:
            self._start()
        request = pickle.dumps((work, argument))
        answers: dict[int, Answer] = {}
        for rank, (_, pipe) in enumerate(self._ranks):
            try:
                pipe.send_bytes(request)
            except OSError as error:
                answers[rank] = Answer(error=f"the rank cannot be reached: {error}", usable=False)
        self._collect(answers)
        if not all(answer.usable for answer in answers.values()):
            self.close()
        return [answers[rank] for rank in range(self.world)]

    @property
    def pids(self) -> list[int]:
        """The processes of the ranks, by rank; none before the first request and after a failure."""
        return [process.pid for process, _ in self._ranks if process.pid is not None]

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="andon-ranks-")
        store = str(Path(self._folder.name) / "store")
        for rank in range(self.world):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=live, args=(rank, self.world, store, theirs), daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))

    def _collect(self, answers: dict[int, Answer]) -> None:
        """Read until every rank has answered, or its time is over; a failure shortens the others' time."""
        deadline = time.monotonic() + self._deadline_s
        while len(answers) < self.world:
            open_ = {pipe: rank for rank, (_, pipe) in enumerate(self._ranks) if rank not in answers}
            ready = wait(list(open_), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                answers |= dict.fromkeys(open_.values(), Answer(error="no answer in time; killed", usable=False))
            for pipe in ready:
                assert isinstance(pipe, Connection)
                answer = answers[open_[pipe]] = _read(pipe)
                if not answer.usable:
                    deadline = min(deadline, time.monotonic() + self._grace_s)

    def close(self) -> None:
        """End the ranks: a closed pipe is their sign to leave; who stays is killed."""
        for _, pipe in self._ranks:
            pipe.close()
        for process, _ in self._ranks:
            process.join(self._grace_s)
            if process.is_alive():
                process.kill()
                process.join()
        self._ranks.clear()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


class RankPools:
    """A pool for each world size, started when it is first asked for. Use as a context manager, or call `close`."""

    def __init__(self) -> None:
        self._pools: dict[int, RankPool] = {}

    def of(self, world: int) -> RankPool:
        """The pool of `world` ranks."""
        return self._pools.setdefault(world, RankPool(world))

    def close(self) -> None:
        """End all ranks."""
        for pool in self._pools.values():
            pool.close()

    def __enter__(self) -> RankPools:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _read(pipe: Connection) -> Answer:
    try:
        answer = pickle.loads(pipe.recv_bytes())  # our own ranks wrote it
    except (EOFError, ConnectionResetError):
        return Answer(error="the rank ended without an answer", usable=False)
    assert isinstance(answer, Answer)
    return answer
