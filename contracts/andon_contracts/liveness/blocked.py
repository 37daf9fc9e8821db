"""Reach a main thread that comes to no hook: interrupt it where Python blocks, abort its groups where native code does.

A blocking call of Python (a sleep, a read, a queue) returns when a signal handler raises. Native code goes on, and the
handler runs only when Python runs again. Then the groups are aborted if their backend can do it.
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

# A real-time signal: those with names mean something to shells, launchers and libraries.
_SIGNAL = signal.SIGRTMIN + 7
_CAN_ABORT = frozenset({"nccl"})
"""Gloo has the method too, but it does nothing."""
_heeding: list[Callable[[], None]] = []


def _handle(number: int, frame: FrameType | None) -> None:
    for heed in list(_heeding):
        heed()


def enlist(heed: Callable[[], None]) -> bool:
    """Let `interrupt` call `heed` in the main thread. False outside the main thread, or if the signal is in use."""
    if threading.current_thread() is not threading.main_thread():
        return False
    if signal.getsignal(_SIGNAL) not in (signal.SIG_DFL, signal.SIG_IGN, _handle):
        return False
    signal.signal(_SIGNAL, _handle)
    _heeding.append(heed)
    return True


def dismiss(heed: Callable[[], None]) -> None:
    """Undo `enlist`. After the last one the signal is ignored, because one may still be on its way."""
    if heed in _heeding:
        _heeding.remove(heed)
        if not _heeding and signal.getsignal(_SIGNAL) is _handle:
            # Only the main thread may do this. Otherwise the handler stays, with nothing to call.
            with suppress(ValueError):
                signal.signal(_SIGNAL, signal.SIG_IGN)


def interrupt() -> None:
    """Make the main thread call what was enlisted, as soon as it runs Python."""
    main = threading.main_thread()
    if _heeding and main.ident is not None and main.is_alive():
        signal.pthread_kill(main.ident, _SIGNAL)


def alarm(seconds: float) -> None:
    """Let the kernel end this process by SIGALRM after that time, even if no thread can run and no lock is free."""
    if threading.current_thread() is threading.main_thread():
        # The default action ends the process; a handler of Python would need the interpreter.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, seconds)


def abort_groups() -> tuple[str, ...]:
    """Abort all groups of this process whose backend can do it. Returns the names of these backends."""
    aborted = set()
    groups = dist.distributed_c10d._world.pg_map if dist.is_available() and dist.is_initialized() else ()
    for group in list(groups):
        for backend in _backends_of(group):
            if backend.name() in _CAN_ABORT:
                backend.abort()
                aborted.add(str(backend.name()))
    return tuple(sorted(aborted))


def what_ends(place: str, aborted: tuple[str, ...]) -> str:
    """What will end a rank that is blocked in `place`, after the groups of the backends `aborted` were aborted."""
    if aborted:
        return f"its {', '.join(aborted)} groups were aborted; it raises when the aborted call returns"
    if "in a collective" not in place:
        return "it raises when Python runs again; hard_stop=True ends it at once"
    backends = _backends_of(dist.distributed_c10d._get_default_group()) if dist.is_initialized() else ()
    waits = sorted({f"{each.name()}: {each.options._timeout}" for each in backends})
    return (
        "its group cannot be aborted; it ends with the rank that it waits for, or by the group's own timeout "
        f"({', '.join(waits)}); hard_stop=True ends it at once"
    )


def _backends_of(group: dist.ProcessGroup) -> Iterator[Any]:
    for device in ("cuda", "cpu"):
        with suppress(RuntimeError):  # the group has no backend for that device
            yield group._get_backend(torch.device(device))
