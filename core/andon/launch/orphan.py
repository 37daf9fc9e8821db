"""A rank never outlives its agent.

Torch's launcher gives each subprocess worker a session of its own, and a forkserver's children have the forkserver as
parent, so neither a signal to the launcher's group nor the death of the direct parent can be relied on alone. A rank
therefore asks the kernel for a death signal *and* looks for its agent five times a second.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import traceback
from collections.abc import Callable

from andon_contracts.liveness.process import Process

POLL_S = 0.2
"""Seconds between two looks at the agent; the bound on an orphan's life is this plus one scheduling delay."""

LAUNCHER = "ANDON_LAUNCHER_PID"
"""The variable in which a launcher gives its process id to the fork server that it starts."""
_PR_SET_PDEATHSIG = 1


def die_with_parent(
    agent_pid: int, failed: Callable[[Exception], None] | None = None, *, poll_s: float = POLL_S
) -> None:
    """End this process by SIGKILL as soon as its direct parent or its agent is gone.

    The kernel's death signal covers the direct parent (the agent under torchrun, the forkserver under `launch`); a
    daemon thread covers the agent, every `poll_s` seconds. An agent that is gone already ends this process at once.
    failed: called, in that thread, with an error that keeps it from looking any more; None: this process ends then.
    """
    if agent_pid < 1:
        raise ValueError(f"agent_pid must be a process id, not {agent_pid}")
    _ask_for_death_signal()
    agent = Process.of(agent_pid)
    if agent is None:
        _end_now()
    else:
        threading.Thread(
            target=_watch, args=(agent, poll_s, failed or _end_by), name="orphan-guard", daemon=True
        ).start()


def bind_to_parent(parent_pid: int) -> None:
    """Have the kernel end this process by SIGKILL when its parent ends; at once where that has happened already."""
    _ask_for_death_signal()
    if os.getppid() != parent_pid:
        _end_now()


def bind_to_launcher() -> None:
    """`bind_to_parent` for the fork server, whose launcher said in `LAUNCHER` who it is: it may be gone already, and
    then this process has another parent."""
    bind_to_parent(int(os.environ.get(LAUNCHER, os.getppid())))


def _ask_for_death_signal() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_PDEATHSIG): {os.strerror(number)}")


def _watch(agent: Process, poll_s: float, failed: Callable[[Exception], None]) -> None:
    never = threading.Event()
    try:
        while agent.state() != "gone":
            never.wait(poll_s)
    except Exception as error:  # noqa: BLE001 - whatever it is, this process must not outlive its agent for it
        failed(error)
        return
    _end_now()


def _end_by(error: Exception) -> None:
    traceback.print_exception(error)
    _end_now()


def _end_now() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
