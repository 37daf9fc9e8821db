"""This host's cores, free memory and GPUs. Imports torch only if a GPU driver is installed."""

from __future__ import annotations

import os
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_CORE = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
_DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/kfd"), Path("/dev/dxg"))  # of NVIDIA, AMD, and NVIDIA under WSL


def gpus() -> int:
    if not any(map(Path.exists, _DRIVERS)):
        return 0
    import torch

    return torch.cuda.device_count()


def physical_cores() -> int:
    """Physical cores that this process may use; hyperthreads of one core count once."""
    allowed = os.sched_getaffinity(0)
    try:
        return len({Path(_CORE.format(cpu)).read_text(encoding="ascii") for cpu in allowed})
    except OSError:
        return len(allowed)


def free_ram() -> int | None:
    """Bytes of memory that processes can still get: the lower of machine and container. None: unknown."""
    kibibytes, left = _named(_MEMINFO, "MemAvailable:"), None
    try:
        limit, used = ((_CGROUP / f"memory.{name}").read_text(encoding="ascii").strip() for name in ("max", "current"))
    except OSError:
        limit = used = ""
    if limit.isdigit() and used.isdigit():
        # Page cache that the kernel frees on demand.
        left = max(int(limit) - int(used) + (_named(_CGROUP / "memory.stat", "inactive_file ") or 0), 0)
    sizes = [None if kibibytes is None else 1024 * kibibytes, left]
    return min((size for size in sizes if size is not None), default=None)


def _named(file: Path, name: str) -> int | None:
    try:
        lines = file.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith(name)), None)
