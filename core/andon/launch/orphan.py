"""A rank never outlives its launcher.

torchrun starts each rank in a new session, and ranks of our launcher have the fork server as parent. So neither a
signal to the launcher's group nor the death of the direct parent is enough: a rank requests a death signal from the
kernel *and* polls its launcher five times a second.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable

from andon.launch.context import LAUNCHER
from andon_contracts.liveness.process import Process

_PR_SET_PDEATHSIG = 1


def die_with_parent(
    launcher_pid: int, failed: Callable[[Exception], None] | None = None, *, poll_s: float = 0.2
) -> None:
    """End this process by SIGKILL as soon as its direct parent or its launcher is gone.

    The kernel's death signal covers the direct parent (torchrun's agent, or our fork server). A daemon thread polls the
    launcher every `poll_s` seconds. If the launcher is gone already, this process ends immediately. failed: called in
    that thread with an error that ends the thread; None: such an error ends this process.
    """
    if launcher_pid < 1:
        raise ValueError(f"launcher_pid must be a process id, not {launcher_pid}")
    _ask_for_death_signal()
    launcher = Process.of(launcher_pid)

    def watch() -> None:
        try:
            while launcher is not None and launcher.state() != "gone":
                time.sleep(poll_s)
        except Exception as error:  # noqa: BLE001 - any error: this process must not outlive its launcher
            if failed is not None:
                failed(error)
                return
            traceback.print_exception(error)
        _end_now()

    if launcher is None:
        _end_now()
    else:
        threading.Thread(target=watch, name="orphan-guard", daemon=True).start()


def bind_to_parent(parent_pid: int) -> None:
    """Have the kernel end this process by SIGKILL when its parent ends; immediately if it has ended already."""
    _ask_for_death_signal()
    if os.getppid() != parent_pid:
        _end_now()


def bind_to_launcher() -> None:
    """`bind_to_parent` for the fork server. The launcher's pid is in `LAUNCHER`, because a fork server whose launcher
    is gone already has another parent."""
    bind_to_parent(int(os.environ.get(LAUNCHER, os.getppid())))


def _ask_for_death_signal() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_PDEATHSIG): {os.strerror(number)}")


def _end_now() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
