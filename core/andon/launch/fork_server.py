"""The fork server, from which ranks are forked: starting ranks, detecting its end, and removing its leftovers.

multiprocessing waits for it without a timeout when a process is started and when the interpreter exits. So a fork
server that is stopped (SIGSTOP, a debugger) is killed: after some seconds while ranks are starting (`launcher`),
immediately if all ranks have ended.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import connection, forkserver, spawn, util
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from andon.console.messages import InputError
from andon_contracts.liveness.process import Process, exit_text
from andon_contracts.untrusted import read_json

_GONE_S = 5.0
_OWNER = "andon-launcher.json"  # in multiprocessing's temporary folder; names the launcher that owns it
_hiding = threading.Lock()


class ServerFailed(RuntimeError):
    """No process could be started: the fork server ended. The message says how."""


def running() -> Process | None:
    """The fork server of this process, or None."""
    pid = getattr(forkserver._forkserver, "_forkserver_pid", None)
    return None if pid is None else Process.of(pid)


def how_it_ended(seconds: float = 0.0) -> str:
    """How this process's fork server ended: by which signal, and whether memory ran out; "" if it has not ended. Waits
    up to `seconds` for its end. Its exit status stays available to multiprocessing."""
    pid, deadline = getattr(forkserver._forkserver, "_forkserver_pid", None), time.monotonic() + seconds
    while pid is not None:
        try:
            status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # not our child, or multiprocessing has reaped it
            return ""
        if status is not None:
            code = -status.si_status if status.si_code in (os.CLD_KILLED, os.CLD_DUMPED) else status.si_status
            return f"the process that ranks are forked from {exit_text(code)}"
        if time.monotonic() >= deadline:
            return ""
        time.sleep(0.01)
    return ""


def require_sockets() -> None:
    """Raise `InputError` if no socket can be created in the temporary folder: the fork server needs one."""
    try:
        address = connection.arbitrary_address("AF_UNIX")  # type: ignore[attr-defined]
        with socket.socket(socket.AF_UNIX) as tried:
            tried.bind(address)
        os.unlink(address)
    except OSError as error:
        where = os.environ.get("TMPDIR", "the folder for temporary files")
        what = f"no socket can be made in {where}: {error.strerror or error}; name another folder, of a short path"
        raise InputError.at("TMPDIR", what) from error


def end_if_stopped() -> None:
    """Kill the fork server if it is stopped: it would never end, and this process would wait for it."""
    server = running()
    if server is not None and server.state() == "stopped":
        server.send(signal.SIGKILL)
        deadline = time.monotonic() + _GONE_S
        while server.state() != "gone" and time.monotonic() < deadline:
            time.sleep(0.01)


@contextmanager
def for_one_launch() -> Iterator[None]:
    """Context manager for use inside another program: a fork server that is started inside ends on exit, and the
    program's preload list is restored. Otherwise its processes would be forked from our server, in which signals are
    blocked."""
    server, was_running = forkserver._forkserver, running() is not None
    preload = list(getattr(server, "_preload_modules", ()))
    try:
        yield
    finally:
        multiprocessing.set_forkserver_preload(preload)
        if not was_running and running() is not None:
            end_if_stopped()
            server._stop()  # type: ignore[attr-defined]


def start(processes: Iterable[ForkServerProcess]) -> None:
    """Start the processes. Waits for the imports of the fork server.

    Unlike with plain multiprocessing, they do not run the program's main module: ranks do not need it, and a script
    without `if __name__ == "__main__"` would start over in each of them. Raises `ServerFailed` if the fork server ends
    meanwhile.
    """
    ours = threading.get_ident()

    def without_main(name: str) -> dict[str, Any]:
        data = prepare(name)
        if threading.get_ident() == ours:
            data = {key: value for key, value in data.items() if not key.startswith("init_main_from_")}
        return data

    with _hiding:
        prepare = spawn.get_preparation_data
        spawn.get_preparation_data = without_main
        try:
            for process in processes:
                process.start()
        except (OSError, EOFError) as error:
            how = how_it_ended(_GONE_S if isinstance(error, EOFError | ConnectionError) else 0.0)
            if how:
                raise ServerFailed(f"no rank could be started: {how}") from error
            raise
        finally:
            spawn.get_preparation_data = prepare


def claim_and_sweep() -> None:
    """Mark this process's folder for sockets, and remove the folders of dead launchers of this machine.

    multiprocessing removes the folder (`/tmp/pymp-...`) when the process ends, but not after SIGKILL.
    """
    with suppress(OSError):  # a disk error here must not prevent training
        (Path(util.get_temp_dir()) / _OWNER).write_text(json.dumps(Process.here().to_json()), encoding="utf-8")
        for file in Path(tempfile.gettempdir()).glob(f"pymp-*/{_OWNER}"):
            folder = file.parent
            with suppress(OSError, ValueError):
                ours = not folder.is_symlink() and folder.stat().st_uid == os.getuid()
                if ours and Process.from_json(read_json(file)).local_state() == "gone":
                    shutil.rmtree(folder, ignore_errors=True)
