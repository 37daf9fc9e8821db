"""What becomes of a rank that is blocked where no Python runs, and that nobody ends by force."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

_CAN_ABORT = frozenset({"nccl"})
"""Gloo has the method too, and does nothing in it."""


def abort_groups() -> tuple[str, ...]:
    """Abort what this process waits for in groups whose backend can; the names of these backends."""
    aborted = []
    for backend in _backends():
        if backend.name() in _CAN_ABORT:
            backend.abort()
            aborted.append(str(backend.name()))
    return tuple(sorted(set(aborted)))


def what_ends(aborted: tuple[str, ...]) -> str:
    """What ends a rank that is blocked now, where `aborted` are the backends whose groups were aborted."""
    if aborted:
        return f"its {', '.join(aborted)} groups were aborted, and it raises when the aborted call returns"
    waits = sorted({f"{backend.name()}: {timeout}" for backend in _backends() if (timeout := _timeout(backend))})
    return (
        "it raises at its next hook; a collective ends with the rank that it waits for, or by its own timeout "
        f"({', '.join(waits) or 'none known'}), since this backend cannot be aborted; hard_stop=True ends it at once"
    )


def _backends() -> Iterator[Any]:
    if not dist.is_available() or not dist.is_initialized():
        return
    for group in list(dist.distributed_c10d._world.pg_map):
        for device in ("cuda", "cpu"):
            try:
                yield group._get_backend(torch.device(device))
            except RuntimeError:  # this group has none for that device
                continue


def _timeout(backend: Any) -> datetime.timedelta | None:
    return getattr(getattr(backend, "options", None), "_timeout", None)
