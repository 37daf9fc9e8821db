"""What becomes of a rank that is blocked where no Python runs, and that nobody ends by force."""

from __future__ import annotations

import contextlib
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


def what_ends(place: str, aborted: tuple[str, ...]) -> str:
    """What ends a rank that is blocked in `place` now, where `aborted` are the backends whose groups were aborted."""
    if aborted:
        return f"its {', '.join(aborted)} groups were aborted; it raises when the aborted call returns"
    if "in a collective" not in place:
        return "it raises when Python runs again; hard_stop=True ends it at once"
    group = dist.distributed_c10d._get_default_group() if dist.is_initialized() else None
    waits = sorted({f"{each.name()}: {each.options._timeout}" for each in _backends_of(group)})
    return (
        "its group cannot be aborted; it ends with the rank that it waits for, or by the group's own timeout "
        f"({', '.join(waits)}); hard_stop=True ends it at once"
    )


def _backends() -> Iterator[Any]:
    if dist.is_available() and dist.is_initialized():
        for group in list(dist.distributed_c10d._world.pg_map):
            yield from _backends_of(group)


def _backends_of(group: dist.ProcessGroup | None) -> Iterator[Any]:
    if group is None:
        return
    for device in ("cuda", "cpu"):
        with contextlib.suppress(RuntimeError):  # the group has none for that device
            yield group._get_backend(torch.device(device))
