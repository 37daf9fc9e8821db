"""The fork server of the ranks, and the processes that come of it. All have ended when the suite's process ends.

Multiprocessing has one fork server per process, and its first user decides which modules that server imports. Ranks
need a server that has imported `adoption`, whichever library starts processes first.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import context, forkserver, popen_forkserver, reduction, resource_tracker, spawn, util
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from andon_falsify.ranks.processes import Process, descendants, kill

PRELOADED = (
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.bert.modeling_bert",
    "peft",
    "andon_falsify.ranks.trainer",
    "andon_falsify.ranks.adoption",
)
"""Imported once, by a server that starts no thread, so that a rank starts in milliseconds."""
FOLDER = "ANDON_FALSIFY_FOLDER"
"""A variable of the server's environment: the folder that the server removes if the suite was killed."""
_POLL_S = 0.01


@dataclass(frozen=True)
class Stray:
    """A process that outlived the case that started it. rank: the pid of the rank that it is from, 0 if unknown."""

    process: Process
    command: str
    rank: int

    def __str__(self) -> str:
        return f"{self.process.pid} ({self.command})"


class Server:
    """A fork server that starts with the first rank, and again after `stop`. preloaded: the modules that it imports."""

    def __init__(self, preloaded: Sequence[str] = PRELOADED) -> None:
        self._server: Any = forkserver.ForkServer()
        self._server.set_forkserver_preload(list(preloaded))
        self._stops_at_exit = False

    @property
    def folder(self) -> Path:
        """The folder for files of the ranks. It goes with this process, even if that is killed."""
        return Path(util.get_temp_dir())

    def fork(self, descriptors: Sequence[int]) -> tuple[int, int]:
        """Fork a process that inherits `descriptors`. Returns two pipe ends: for reading its pid, and for its work.

        Only this process receives a Ctrl-C. Otherwise it would end the server in the middle of an import.
        """
        if not self._stops_at_exit:
            util.Finalize(None, self.stop, exitpriority=10)  # before multiprocessing waits for its processes
            util.Finalize(None, _stop_tracker, exitpriority=-200)  # after it has removed its folder
            self._stops_at_exit = True
        # The server and multiprocessing's tracker must not look for modules in the folder that they are started in.
        with environment(**{FOLDER: str(self.folder), "PYTHONSAFEPATH": "1"}), _interrupts_blocked():
            resource_tracker.ensure_running()  # it unblocks SIGINT
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            self._server.ensure_running()
        found: tuple[int, int] = self._server.connect_to_new_process(descriptors)
        return found

    def strays(self, ranks: Collection[int], wait_s: float) -> list[Stray]:
        """The processes that ranks with these pids, dead or alive, have left behind, and that run after `wait_s`.

        A rank leads a session. Its descendants have it as an ancestor, or have its session, or else the server has
        adopted them.
        """
        deadline = time.monotonic() + wait_s
        while (found := self._strays(ranks)) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return found

    def _strays(self, ranks: Collection[int]) -> list[Stray]:
        living = {child.pid for child in multiprocessing.active_children()} | set(ranks)
        found = []
        for process, ancestors in self._descendants().items():
            with suppress(ProcessLookupError):  # it has just ended
                if process.pid in living or process.zombie:
                    continue
                above = [os.getsid(process.pid), *ancestors]
                rank = next((pid for pid in above if pid in ranks), 0)
                if rank or living.isdisjoint(above):
                    words = process.command
                    found.append(Stray(process, words if len(words) <= 60 else f"{words[:60]}...", rank))
        return found

    def _descendants(self) -> dict[Process, list[int]]:
        pid = self._server._forkserver_pid
        return {} if pid is None else descendants(pid)

    def stop(self) -> None:
        """Kill every process that came of the server, then the server: while it lives, it adopts what they leave."""
        pid, deadline = self._server._forkserver_pid, time.monotonic() + 5.0
        if pid is not None:
            with _interrupts_blocked(), suppress(OSError):  # its socket's folder may be gone
                while (found := self._descendants()) and time.monotonic() < deadline:
                    kill(found, _POLL_S)
                os.kill(pid, signal.SIGKILL)
                self._server._stop()


SERVER = Server()
"""All pools of this process share this server."""


class RankProcess(BaseProcess):
    """A process that `SERVER` forks. Its own processes start by the default method, as they do under torchrun."""

    _start_method = None

    @staticmethod
    def _Popen(process_obj: BaseProcess) -> _Launch:
        return _Launch(process_obj)


class _Launch(popen_forkserver.Popen):
    """Starts a process as multiprocessing does, but from `SERVER`."""

    _fds: list[int]

    def _launch(self, process_obj: Any) -> None:
        buffer = io.BytesIO()
        context.set_spawning_popen(self)
        try:
            reduction.dump(spawn.get_preparation_data(process_obj._name), buffer)
            reduction.dump(process_obj, buffer)
        finally:
            context.set_spawning_popen(None)
        self.sentinel, written = SERVER.fork(self._fds)
        # The child takes the end of this pipe for the end of its parent.
        self.finalizer = util.Finalize(self, util.close_fds, (os.dup(written), self.sentinel))  # type: ignore[attr-defined]
        with open(written, "wb") as pipe:
            pipe.write(buffer.getbuffer())
        self.pid = forkserver.read_signed(self.sentinel)


@contextmanager
def environment(**values: str) -> Iterator[None]:
    """Inside, the environment has `values`; afterwards it is what it was, whatever has changed it."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _stop_tracker() -> None:
    """End multiprocessing's other process, which would end by itself a moment after this process."""
    tracker: Any = resource_tracker._resource_tracker
    if tracker._pid is not None:
        with suppress(OSError):
            tracker._stop()
