"""The process that ranks are forked from: the suite's own. It has ended, with all that it started, before this one.

Multiprocessing has one fork server for a whole process, and its first user decides what that loads. Ranks need one
that has loaded `adoption`, whoever else starts processes.
"""

from __future__ import annotations

import io
import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import context, forkserver, popen_forkserver, reduction, resource_tracker, spawn, util
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from andon_contracts.liveness.process import Process
from andon_falsify.ranks.leftovers import below

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
"""Imported once, by a server that starts no thread, so that a rank is there in milliseconds."""
FOLDER = "ANDON_FALSIFY_FOLDER"
"""In the server's environment: what it removes where this process ended without having ended the server."""
_LAST, _AFTER_ALL = -50, -200
"""When this process ends: after its own processes have ended, and after what multiprocessing itself puts away."""
_GRACE_S = 5.0
_POLL_S = 0.005


class Server:
    """A fork server that is started when the first rank is, and again after `stop`. preloaded: what it imports."""

    def __init__(self, preloaded: Sequence[str] = PRELOADED) -> None:
        self._preloaded = list(preloaded)
        self._held = self._new()
        self._known_at_exit = False

    def _new(self) -> Any:
        held = forkserver.ForkServer()
        held.set_forkserver_preload(self._preloaded)
        return held

    @property
    def folder(self) -> Path:
        """The folder of this process for what its ranks leave in files; gone when this process is, even if killed."""
        return Path(util.get_temp_dir())

    def fork(self, descriptors: Sequence[int]) -> tuple[int, int]:
        """Ask for a process that inherits `descriptors`: where its pid is read, and where what it is to do is written.

        A Ctrl-C is for this process alone: it would end the server in the middle of an import.
        """
        if not self._known_at_exit:
            util.Finalize(None, self.stop, exitpriority=_LAST)
            util.Finalize(None, _stop_tracker, exitpriority=_AFTER_ALL)
            self._known_at_exit = True
        # Where these two look for modules, the folder that they are started in must not come first.
        given = {FOLDER: str(self.folder), "PYTHONSAFEPATH": "1"}
        before = {name: os.environ.get(name) for name in given}
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        os.environ.update(given)
        try:
            resource_tracker.ensure_running()  # starting it unblocks SIGINT
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            self._held.ensure_running()
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        found: tuple[int, int] = self._held.connect_to_new_process(descriptors)
        return found

    def stop(self) -> None:
        """End the server, its ranks and what they left behind, each by its pid; nothing where it does not run."""
        held, pid = self._held, self._held._forkserver_pid
        if pid is None:
            return
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            _end(pid)
            os.waitpid(pid, 0)
            os.close(held._forkserver_alive_fd)
            with suppress(OSError):
                os.unlink(held._forkserver_address)
        finally:
            self._held = self._new()
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


SERVER = Server()
"""All pools of this process have the same."""


class RankProcess(BaseProcess):
    """A process that `SERVER` forks."""

    _start_method = "forkserver"

    @staticmethod
    def _Popen(process_obj: BaseProcess) -> _Launch:
        return _Launch(process_obj)


class _Launch(popen_forkserver.Popen):
    """As multiprocessing does it, by a server of ours."""

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
        self.finalizer = util.Finalize(self, _close, (os.dup(written), self.sentinel))
        with open(written, "wb") as pipe:
            pipe.write(buffer.getbuffer())
        self.pid = forkserver.read_signed(self.sentinel)


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _end(server: int) -> None:
    """Kill what runs below the process `server`, then that."""
    held, deadline = Process.of(server), time.monotonic() + _GRACE_S
    while (found := below(server)) and time.monotonic() < deadline:
        for pid in found:
            child = Process.of(pid)
            if child is not None:
                child.send(signal.SIGKILL)
        time.sleep(_POLL_S)
    if held is not None:
        held.send(signal.SIGKILL)


def _stop_tracker() -> None:
    """End multiprocessing's other process, which would end by itself a moment after this one."""
    tracker: Any = resource_tracker._resource_tracker
    if tracker._pid is not None:
        with suppress(OSError):
            tracker._stop()
