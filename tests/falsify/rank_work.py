"""What the ranks of a pool are asked to do in its tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import torch.distributed as dist

from andon_contracts import policy

_LEFT = ExitStack()
_KEPT: list[subprocess.Popen[bytes]] = []


def describe(word: str) -> tuple[str, int, int]:
    return word, dist.get_rank(), os.getpid()


def raise_on(rank: int) -> None:
    """An error on one rank; the others go on to the sentinel and wait there."""
    if dist.get_rank() == rank:
        raise ArithmeticError("this rank cannot go on")


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        print("nothing goes on", flush=True)
        os._exit(3)


def kill_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)


def leave_on(rank: int) -> None:
    if dist.get_rank() == rank:
        sys.exit(0)


def lie_on(rank: int) -> None:
    if dist.get_rank() == rank:
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def answer_nothing_that_travels_on(rank: int) -> object:
    return threading.Lock() if dist.get_rank() == rank else None


def start_on(where: tuple[int, str]) -> None:
    rank, written = where
    if dist.get_rank() == rank:
        Path(written).write_text(str(subprocess.Popen(["sleep", "1000"]).pid))


def start_and_die_on(where: tuple[int, str]) -> None:
    start_on(where)
    die_on(where[0])


def hide_on(where: tuple[int, str]) -> None:
    """The process is in a session of its own, and what started it has ended, as a daemon's has."""
    rank, written = where
    if dist.get_rank() == rank:
        subprocess.run(["sh", "-c", f"setsid sleep 1000 & echo $! > {written}"], check=True)


def employ_on(where: tuple[int, str]) -> None:
    rank, written = where
    if dist.get_rank() == rank:
        _KEPT.append(subprocess.Popen(["cat"], stdin=subprocess.PIPE))
        Path(written).write_text(str(_KEPT[-1].pid))


def hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        threading.Event().wait()


def leave_contracts_off(_: object) -> None:
    _LEFT.enter_context(policy.suspended())


def group_of(_: object) -> tuple[str, int]:
    return dist.get_backend(), dist.get_world_size()
