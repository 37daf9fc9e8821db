"""What `benchmarks.soak` plants in the processes of its run: each rank's account of its memory, and leaks as controls.

From outside only pages are visible, and malloc touches pages of its own long after the start. From inside malloc counts
what is in use to the byte, if Python takes everything from malloc (`ENVIRONMENT`). So each rank writes at every
fiftieth step what is in use, and how much data is mapped beside malloc. It collects garbage first, which also empties
the lists of freed objects that Python keeps.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from falsify.nemesis.planting import Planting

ENVIRONMENT = {
    "PYTHONMALLOC": "malloc",
    "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0",
    "TORCH_FR_BUFFER_SIZE": "200",
}
"""Without these, Python's own allocator maps memory that malloc does not see, malloc counts as used what it caches for
each thread, and torch records 2,000 collectives (3 MiB) before its buffer is full."""
EVERY = 50
"""Steps of a rank between two looks."""
ALLOWED = 2**29 // 1_000_000
"""Bytes that a rank may grow by in a step: half a GiB in a million steps, which is weeks of training."""
LEAKS = {
    "handle": "launcher: open files",
    "memory": "launcher: memory, KiB",
    "rank": "ranks: memory in use once settled, KiB",
}
"""Each leak that can be planted, with the row of the table that must show it."""
_FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
_kept: list[object] = []


class _Malloc(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]


@dataclass(frozen=True)
class Look:
    """One rank at one step. age: steps of its process. in_use: bytes of malloc. beside: bytes mapped by others."""

    pid: int
    rank: int
    age: int
    step: int
    in_use: int
    beside: int


def account(plan: Planting) -> None:
    path, age = plan.proofs.parent / "looks.jsonl", 0

    def look(step: Any, batch: Any) -> None:
        nonlocal age
        if age % EVERY == 0:
            gc.collect()
            found = Look(os.getpid(), step._backend.ranks[0], age, batch.step, *_memory())
            handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
            os.write(handle, f"{json.dumps(asdict(found))}\n".encode())
            os.close(handle)
        age += 1

    _before_each_step(look)
    plan.acted()


def _memory() -> tuple[int, int]:
    """Bytes that malloc has given out, and bytes of other private data. Raises `OSError` before glibc 2.33."""
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        raise OSError("this system's malloc does not report what is in use: mallinfo2 needs glibc 2.33") from None
    mallinfo.restype = _Malloc
    found = mallinfo()
    lines = Path("/proc/self/status").read_text().splitlines()
    mapped = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:"))
    return int(found.uordblks + found.hblkhd), mapped - int(found.arena + found.hblkhd)


def looks(scratch: Path) -> Iterator[Look]:
    """The whole lines that the ranks wrote; a rank may be killed within a line."""
    path = scratch / "looks.jsonl"
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
        if line.endswith(b"}\n"):
            yield Look(**json.loads(line))


def handle(plan: Planting) -> None:
    _with_each_generation(lambda: os.open(os.devnull, os.O_RDONLY))
    plan.acted()


def memory(plan: Planting) -> None:
    _with_each_generation(lambda: os.urandom(256 * 1024))
    plan.acted()


def rank(plan: Planting) -> None:
    _before_each_step(lambda _step, _batch: _kept.append(bytes(ALLOWED * 5 // 4)))
    plan.acted()


def _before_each_step(act: Callable[[Any, Any], None]) -> None:
    from andon.step.step import TrainingStep

    launch = TrainingStep.launch

    def launched(self: TrainingStep, batch: Any, *args: Any, **named: Any) -> Any:
        act(self, batch)
        return launch(self, batch, *args, **named)

    TrainingStep.launch = launched  # type: ignore[method-assign]


def _with_each_generation(leak: Callable[[], object]) -> None:
    from andon.launch import elastic

    generation = elastic._Generations._generation

    def leaking(generations: Any, number: int) -> Any:
        _kept.append(leak())
        return generation(generations, number)

    elastic._Generations._generation = leaking  # type: ignore[method-assign, assignment]
