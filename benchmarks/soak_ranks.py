"""What `benchmarks.soak` plants in each rank: an account of its memory, and a leak as a control.

From outside only pages are visible, and malloc touches new pages long after the start. Inside the process malloc counts
the bytes in use, if Python takes all its memory from malloc (`ENVIRONMENT`). Each rank writes these bytes, and those
mapped beside malloc, at every fiftieth step. It collects garbage first, which also empties Python's free lists.
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
"""Without these, Python maps memory that malloc does not count, malloc counts its per-thread caches as used, and torch
records 2,000 collectives (3 MiB) before its buffer is full."""
EVERY = 50
"""Steps of a rank between two looks."""
ALLOWED = 2**29 // 1_000_000
"""Bytes per step that a rank may grow by: half a GiB in a million steps, which is weeks of training."""
_FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
_kept: list[object] = []


class _Malloc(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]


@dataclass(frozen=True)
class Look:
    """The memory of a rank. age: steps of its process. in_use: bytes of malloc. beside: bytes mapped beside malloc."""

    pid: int
    age: int
    in_use: int
    beside: int


def account(plan: Planting) -> None:
    path, age = plan.scratch / "looks.jsonl", 0

    def look() -> None:
        nonlocal age
        if age % EVERY == 0:
            gc.collect()
            found = Look(os.getpid(), age, *_memory())
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
    """What the ranks wrote, without a last line that was cut off by a kill."""
    path = scratch / "looks.jsonl"
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
        if line.endswith(b"}\n"):
            yield Look(**json.loads(line))


def leak(plan: Planting) -> None:
    _before_each_step(lambda: _kept.append(bytes(ALLOWED * 5 // 4)))
    plan.acted()


def _before_each_step(act: Callable[[], object]) -> None:
    from andon.step.step import TrainingStep

    launch = TrainingStep.launch

    def launched(*args: Any, **named: Any) -> Any:
        act()
        return launch(*args, **named)

    TrainingStep.launch = launched  # type: ignore[method-assign]
