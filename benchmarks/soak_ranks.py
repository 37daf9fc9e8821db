"""Ranks' own account of their memory while they train: a plant that the soak puts into each (`nemesis.planting`).

From outside only pages can be seen, and pages tell little: malloc keeps what it was given back, gives that out again
before it asks for more, and touches some of what it holds for the first time hours later. What is in use is another
matter: malloc counts it to the byte, and in the soak Python takes everything from malloc (`ENVIRONMENT`). So a rank
says at every fiftieth step what is in use, and what data it has mapped beside malloc. Before, it has Python collect all
garbage, and with it the lists of freed objects that Python keeps, up to 2,000 of each kind.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from falsify.nemesis.planting import Planting

ENVIRONMENT = {
    "PYTHONMALLOC": "malloc",
    "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0",
    "TORCH_FR_BUFFER_SIZE": "200",
}
"""Python's own allocator maps memory of its own, in which malloc sees nothing. Malloc counts as in use what it keeps
for each thread to give out again, seven blocks of each of 64 sizes; odd sizes fill that for ten thousand steps. Torch
keeps the last 2,000 collectives of a process with their stacks: 3 MiB, full after a thousand steps."""
EVERY = 50
"""Steps of a rank between two looks."""
_FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class _Malloc(ctypes.Structure):
    """The struct that glibc's `mallinfo2` returns, over all arenas."""

    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]


@dataclass(frozen=True)
class Look:
    """A rank's account of itself. age: steps that its process has taken. step: of the coming update.

    in_use: bytes that malloc has given out and not got back. beside: bytes of data that others than malloc have mapped.
    """

    pid: int
    rank: int
    age: int
    step: int
    in_use: int
    beside: int


def account(plan: Planting) -> None:
    """Have every rank write a `Look` before every fiftieth of its steps."""
    from andon.step.step import TrainingStep

    launch, age = TrainingStep.launch, 0

    def looked_at(self: TrainingStep, batch: Any, *args: Any, **named: Any) -> Any:
        nonlocal age
        if age % EVERY == 0:
            _write(said_in(plan.proofs.parent), self._backend.ranks[0], age, batch.step)
        age += 1
        return launch(self, batch, *args, **named)

    TrainingStep.launch = looked_at  # type: ignore[method-assign]
    plan.acted()


def said_in(scratch: Path) -> Path:
    """Where the ranks of a run write, one line a look."""
    return scratch / "said.jsonl"


def looks(scratch: Path) -> Iterator[Look]:
    """The lines that they wrote, but for a line that a rank was killed in."""
    path = said_in(scratch)
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
        if line.endswith(b"}\n"):
            yield Look(**json.loads(line))


def in_use() -> int:
    """Bytes that malloc has given out and not got back, in all of this process. Raises `OSError` without glibc 2.33."""
    found = _malloc()()
    return int(found.uordblks + found.hblkhd)


def beside() -> int:
    """Bytes of writable private address space (`VmData`) that are not malloc's: stacks of threads, and what is mapped.

    Raises `OSError` as `in_use` does.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    mapped = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:"))
    found = _malloc()()
    return mapped - int(found.arena + found.hblkhd)


@functools.cache
def _malloc() -> Any:
    try:
        function = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        raise OSError("this system's malloc does not say what is in use: mallinfo2 came with glibc 2.33") from None
    function.restype = _Malloc
    return function


def _write(path: Path, rank: int, age: int, step: int) -> None:
    gc.collect()
    look = Look(os.getpid(), rank, age, step, in_use(), beside())
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        os.write(handle, f"{json.dumps(asdict(look))}\n".encode())
    finally:
        os.close(handle)
