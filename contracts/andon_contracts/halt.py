"""Halt together: what one rank found reaches all others, whatever they are doing.

The cord is a key in a store (a connection of our own to the store of the process group). A thread on every rank looks
at it; a rank that runs Python raises at its next hook. A rank that is blocked where no Python runs, as in a
collective, is ended by the thread only with `hard_stop`; otherwise its own timeout, or the end of the rank that it
waits for, ends it, and the message says so.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

_POLL_S = 0.2
_GRACE_S = 1.0
"""How long a rank has to raise by itself before `hard_stop` ends it, and the puller waits for the others."""
_KEY = "pulled"


class Cord:
    """What any rank may pull, once. `seen` is the message of who pulled it, on every rank."""

    def __init__(self, store: Store, rank: int, world_size: int, *, hard_stop: bool) -> None:
        self.seen: str | None = None
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._hard_stop = hard_stop
        self._over = threading.Event()
        self._raised = threading.Event()
        self._thread = threading.Thread(target=self._look, name="andon-cord", daemon=True)
        self._hook: Callable[..., object] = sys.excepthook
        self._mine = self._excepthook
        sys.excepthook = self._mine
        self._thread.start()

    def pull(self, message: str) -> str:
        """Tell all ranks to stop for `message`; returns the first one that was given. Waits briefly for the others."""
        bits = self._store.compare_set(_KEY, "", message)
        self.seen = bits.decode("utf-8", "replace")
        self._raised.set()
        self._acknowledge()
        _tell_launcher(self.seen)
        deadline = time.monotonic() + _GRACE_S
        others = [f"ended {rank}" for rank in range(self._world_size) if rank != self._rank]
        with contextlib.suppress(RuntimeError):
            while time.monotonic() < deadline and not all(self._store.check([key]) for key in others):
                self._over.wait(_POLL_S / 4)
        return self.seen

    def raised(self) -> None:
        """This rank runs Python and is about to raise what was seen: it needs no hard stop."""
        self._raised.set()

    def close(self) -> None:
        """Stop looking."""
        self._over.set()
        if sys.excepthook is self._mine:
            sys.excepthook = self._hook
        if threading.current_thread() is not self._thread:
            self._thread.join(5 * _POLL_S)

    def _acknowledge(self) -> None:
        # Who pulled may be gone already, and with it the store.
        with contextlib.suppress(RuntimeError):
            self._store.set(f"ended {self._rank}", "1")

    def _look(self) -> None:
        while not self._over.wait(_POLL_S):
            try:
                pulled = self._store.check([_KEY])
            except RuntimeError:
                return  # the store is gone: the launcher knows why
            if pulled:
                self.seen = self.seen or self._store.get(_KEY).decode("utf-8", "replace")
                self._acknowledge()
                self._end()
                return

    def _end(self) -> None:
        if not self._hard_stop or self._raised.wait(_GRACE_S) or self._over.is_set():
            return
        text = f"{self.seen}\n  state    rank {self._rank} was blocked where no Python runs, and was ended (hard_stop)"
        _tell_launcher(text)
        print(text, file=sys.stderr, flush=True)
        os._exit(1)

    def _excepthook(self, kind: type[BaseException], error: BaseException, trace: object) -> None:
        if self.seen is None:
            with contextlib.suppress(RuntimeError):
                self.pull(f"rank {self._rank} failed, which is no violation: {kind.__name__}: {error}")
        self._hook(kind, error, trace)


def own_store(name: str) -> Store | None:
    """A connection of our own to the process group's store, with keys under `name`; None without a group."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    shared = dist.distributed_c10d._get_default_store()
    clone = getattr(shared, "clone", None)
    if clone is not None:
        with contextlib.suppress(RuntimeError, NotImplementedError):
            shared = clone()
    return PrefixStore(f"andon/{name}", shared)


def _tell_launcher(message: str) -> None:
    """Write torch's error file, if the launcher named one, so that it names the right cause."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or Path(path).exists():
        return
    extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
    with contextlib.suppress(OSError):
        Path(path).write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}), encoding="utf-8")
