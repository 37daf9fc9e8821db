"""What ranks do in the tests of the launcher: all of it works without torch, so that ranks start fast.

Ranks speak to a test through a named pipe: a line says that a rank has come to a point, and the end of the file that
no rank that ever opened it lives any more.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from andon.console.messages import Exit, InputError, Problem
from andon.launch.context import RankContext
from andon.launch.rank import preempted
from andon_contracts.violation import Finding, Violation

Payload = Mapping[str, Any]


def echo(payload: Payload) -> int:
    context = RankContext.from_environment()
    parent = Path(f"/proc/{os.getppid()}/status").read_text()
    found = {
        "payload": payload,
        "world_size": context.world_size,
        "run_id": context.run_id,
        "launcher_pid": context.launcher_pid,
        "threads_of_the_forking_process": int(parent.split("Threads:")[1].split()[0]),
        "omp": os.environ["OMP_NUM_THREADS"],
        "variable": os.environ.get("ANDON_TEST_VARIABLE"),
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "store": os.environ["ANDON_STORE"],
        "entered by": stat.filemode(Path(os.environ["ANDON_STORE"]).parent.stat().st_mode),
    }
    (Path(payload["folder"]) / f"echo-{context.rank}.json").write_text(json.dumps(found))
    print(f"rank {context.rank} says {payload.get('say')}", flush=True)
    return Exit.OK


def end(payload: Payload) -> int:
    """End as `payload["how"]` says for this rank; ranks that it does not name wait to be ended."""
    rank = str(RankContext.from_environment().rank)
    how = payload["how"].get(rank, "wait")
    pipe = _open(payload)
    _say(pipe, rank, os.getpid())
    if how == "raise":
        raise LookupError("nobody foresaw this\nand a second line")
    if how == "mistake":
        raise InputError([Problem("train.csv:17", "label 9 is unknown"), Problem("--workers", "0 is too few")])
    if how == "violation":
        raise Violation.of("weights agree", Finding("2 digests", step=3, ranks=(1,), tensor="lora_A"))
    if how in ("SIGKILL", "SIGSEGV"):
        os.kill(os.getpid(), getattr(signal, how))
    if how in ("wait", "link_error"):
        _wait(link_error=how == "link_error")
        return Exit.PREEMPTED
    return int(how)


def _wait(*, link_error: bool) -> None:
    step = threading.Event()
    while link_error or not preempted():
        step.wait(0.02)


def _open(payload: Payload) -> int:
    return os.open(payload["pipe"], os.O_WRONLY) if "pipe" in payload else -1


def _say(pipe: int, *words: object) -> None:
    if pipe >= 0:
        os.write(pipe, (" ".join(map(str, words)) + "\n").encode())
