"""A main thread that comes to no hook of ours: how it is reached where it sleeps, and what becomes of it elsewhere.

A blocking call that Python made (a sleep, a read, a queue) returns when a signal handler raises. What native code
blocks on goes on, and the handler runs when Python does again: then the groups are aborted whose backend can.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

# A real-time one: those with names mean something to shells, launchers and libraries.
_SIGNAL = signal.SIGRTMIN + 7
_CAN_ABORT = frozenset({"nccl"})
"""Gloo has the method too, and does nothing in it."""
_heeding: list[Callable[[], None]] = []


def _handle(number: int, frame: FrameType | None) -> None:
    for heed in list(_heeding):
        heed()


def enlist(heed: Callable[[], None]) -> bool:
    """Let `interrupt` call `heed` in the main thread. False where that cannot be arranged.

    It cannot outside the main thread, and where somebody else uses the signal.
    """
    if threading.current_thread() is not threading.main_thread():
        return False
    if signal.getsignal(_SIGNAL) not in (signal.SIG_DFL, signal.SIG_IGN, _handle):
        return False
    signal.signal(_SIGNAL, _handle)
    _heeding.append(heed)
    return True


def dismiss(heed: Callable[[], None]) -> None:
    """No longer call `heed`; after the last one the signal is ignored, since one may still be under way."""
    if heed in _heeding:
        _heeding.remove(heed)
        if not _heeding and signal.getsignal(_SIGNAL) is _handle:
            # Only the main thread may; elsewhere the handler stays, and calls nobody.
            with suppress(ValueError):
                signal.signal(_SIGNAL, signal.SIG_IGN)


def interrupt() -> None:
    """Let the main thread call those who enlisted, as soon as it runs Python."""
    main = threading.main_thread()
    if _heeding and main.ident is not None and main.is_alive():
        signal.pthread_kill(main.ident, _SIGNAL)


def alarm(seconds: float) -> None:
    """Let the system end this process by SIGALRM after that time: no thread has to run for it, no lock to be free."""
    if threading.current_thread() is threading.main_thread():
        # The default action is the kernel's, which ends the process; a handler of Python would have to get to run.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, seconds)


def abort_groups() -> tuple[str, ...]:
    """Abort what this process waits for in groups whose backend can; the names of these backends."""
    aborted = set()
    for backend in _backends():
        if backend.name() in _CAN_ABORT:
            backend.abort()
            aborted.add(str(backend.name()))
    return tuple(sorted(aborted))


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
        with suppress(RuntimeError):  # the group has none for that device
            yield group._get_backend(torch.device(device))
