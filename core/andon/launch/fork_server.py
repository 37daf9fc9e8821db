"""The process that ranks and agents are forked from, where it does not run any more.

Whoever starts a process waits for its answer without a bound, and so does an interpreter that ends. One that is stopped
(SIGSTOP, a debugger) is therefore ended: at once where all ranks have ended, after `STOPPED_S` where one is started.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import connection, forkserver, spawn
from typing import Any

from andon.console.exits import Exit
from andon.console.problems import InputError, Problem
from andon_contracts.liveness.process import STOPPED_BY, ConditionTimer, Process, exit_text
from andon_contracts.violation import first_line

STOPPED_S = 5.0
"""Seconds that the fork server may be stopped while a process is started."""
_LOOK_S = 0.1
_GONE_S = 5.0


class ServerFailed(RuntimeError):
    """No process could be started: the fork server ended. The message says how."""

    ends_with = Exit.RANK_LOST


class ServerStopped(ServerFailed):
    """No process could be started: the fork server did not run, and was ended."""

    ends_with = Exit.RANK_SILENT


class TooManyRanks(ServerFailed):
    """Each rank inherits the pipes of all ranks, and the fork server accepts about 250 of them in one request."""

    ends_with = Exit.USAGE


def running() -> Process | None:
    """The fork server of this process; None where there is none that lives."""
    pid = getattr(forkserver._forkserver, "_forkserver_pid", None)
    return None if pid is None else Process.of(pid)


def how_it_ended(seconds: float = 0.0) -> str:
    """How this process's fork server ended: by which signal, and whether memory ran out. Empty if it runs or if there
    is none. Waits `seconds` for its end, and leaves its exit status for multiprocessing.
    """
    pid = getattr(forkserver._forkserver, "_forkserver_pid", None)
    deadline, pause = time.monotonic() + seconds, threading.Event()
    while pid is not None:
        try:
            found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # another one's child, or multiprocessing has seen its end
            return ""
        if found is not None:
            killed = found.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
            return (
                f"the process that ranks are forked from {exit_text(-found.si_status if killed else found.si_status)}"
            )
        if time.monotonic() >= deadline:
            return ""
        pause.wait(0.01)
    return ""


def require_sockets() -> None:
    """Raise `InputError` where the folder for temporary files takes no socket: whoever forks ranks is asked by one."""
    try:
        address = connection.arbitrary_address("AF_UNIX")  # type: ignore[attr-defined]
        with socket.socket(socket.AF_UNIX) as tried:
            tried.bind(address)
        os.unlink(address)
    except OSError as error:
        where = os.environ.get("TMPDIR", "the folder for temporary files")
        what = f"no socket can be made in {where}: {error.strerror or error}; name another folder, of a short path"
        raise InputError([Problem("TMPDIR", what)]) from error


def end_if_stopped() -> None:
    """End the fork server where it is stopped: nothing would ever end it, and this process would wait for it."""
    server = running()
    if server is not None and server.state() == "stopped":
        _end(server)


@contextmanager
def for_one_launch() -> Iterator[None]:
    """A fork server that is started inside ends with the context, and what others would have it import stays theirs.

    In a program of somebody else's: what they start themselves would be forked from ours, in which signals are blocked.
    """
    server, there = forkserver._forkserver, running() is not None
    preload = list(getattr(server, "_preload_modules", ()))
    try:
        yield
    finally:
        multiprocessing.set_forkserver_preload(preload)
        if not there and running() is not None:
            end_if_stopped()
            server._stop()  # type: ignore[attr-defined]


_hiding = threading.Lock()


@contextmanager
def _main_hidden() -> Iterator[None]:
    """What this thread starts meanwhile does not run the program's own main module first, as multiprocessing has it.

    Ranks need nothing of it, and a script that has no `if __name__ == "__main__"` would begin anew in each of them.
    """
    ours = threading.get_ident()

    def without_main(name: str) -> dict[str, Any]:
        found = prepare(name)
        if threading.get_ident() == ours:
            found = {key: value for key, value in found.items() if not key.startswith("init_main_from_")}
        return found

    with _hiding:
        prepare = spawn.get_preparation_data
        spawn.get_preparation_data = without_main
        try:
            yield
        finally:
            spawn.get_preparation_data = prepare


@contextmanager
def starting() -> Iterator[None]:
    """While processes are started: a fork server that is stopped meanwhile is ended. They are given no main module.

    Raises `ServerStopped` where that was so, whatever came of the start, `ServerFailed` if the fork server ended
    meanwhile, `TooManyRanks`, and `RuntimeError` where nobody could look.
    """
    over, ended, failed = threading.Event(), threading.Event(), list[Exception]()

    def watch() -> None:
        try:
            _watch(over, ended)
        except Exception as error:  # noqa: BLE001 - whatever it is, what was started then was not looked after
            failed.append(error)

    watching = threading.Thread(target=watch, name="fork-server", daemon=True)
    watching.start()
    try:
        with _main_hidden():
            yield
    except (OSError, EOFError) as error:
        if ended.is_set():
            raise ServerStopped(_sentence()) from error
        how = how_it_ended(_GONE_S if isinstance(error, EOFError | ConnectionError) else 0.0)
        if how:
            raise ServerFailed(f"no rank could be started: {how}") from error
        raise
    except ValueError as error:
        if str(error) != "too many fds":  # multiprocessing's words
            raise
        what = (
            "run.workers: one launcher cannot start so many ranks (the limit is about 120); set fewer, or use torchrun"
        )
        raise TooManyRanks(what) from error
    finally:
        over.set()
        watching.join()  # at its next look it may have found the server stopped for too long
    if ended.is_set():
        raise ServerStopped(_sentence())
    if failed:
        raise RuntimeError(f"the watch over the fork server failed: {first_line(failed[0])}") from failed[0]


def _watch(over: threading.Event, ended: threading.Event) -> None:
    """Until `over`, or until the fork server has been stopped for too long and is `ended`."""
    stopped = ConditionTimer(2 * _LOOK_S)
    while not over.wait(_LOOK_S):
        server = running()
        stopped_s = stopped.update([server.pid] if server is not None and server.state() == "stopped" else [])
        if server is not None and stopped_s.get(server.pid, 0.0) >= STOPPED_S:
            ended.set()
            _end(server)
            return


def _end(server: Process) -> None:
    server.send(signal.SIGKILL)
    deadline, pause = time.monotonic() + _GONE_S, threading.Event()
    while server.state() != "gone" and time.monotonic() < deadline:
        pause.wait(0.01)


def _sentence() -> str:
    return f"no rank could be started: the fork server did not run for {STOPPED_S:g} s, {STOPPED_BY}"
