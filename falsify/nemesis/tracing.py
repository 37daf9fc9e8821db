"""strace on a process: what it calls is seen, and single calls are killed or refused."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_LAST_LINES_S = 5.0
"""How long strace has to write what it saw last."""


def missing() -> str | None:
    """Why no system call can be failed on this machine; None where it can."""
    strace = shutil.which("strace")
    if strace is None:
        return "strace is not installed"
    tried = subprocess.run(
        [strace, "-o", os.devnull, "-e", "inject=getppid:error=EIO", sys.executable, "-c", "import os; os.getppid()"],
        capture_output=True,
        text=True,
        check=False,
    )
    return None if tried.returncode == 0 else f"strace may not trace: {tried.stderr.strip()[-200:]}"


@contextmanager
def attached(pid: int, *options: str) -> Iterator[None]:
    """strace on a process for the time of the context, by whose end the process is to have ended.

    It has stopped the process once before the body runs, so that it misses no later call. Raises `RuntimeError` where
    it does not attach.
    """
    with subprocess.Popen(["strace", "-y", *options, "-p", str(pid)], stderr=subprocess.PIPE, text=True) as strace:
        assert strace.stderr is not None
        said = strace.stderr.readline()
        if f"{pid} attached" not in said:
            raise RuntimeError(f"strace does not attach: {said}")
        try:
            yield
        finally:
            # It ends with what it traces. Where it does not it is killed: asked to, it may wait for a thread for ever.
            try:
                strace.communicate(timeout=_LAST_LINES_S)
            except subprocess.TimeoutExpired:
                strace.kill()
