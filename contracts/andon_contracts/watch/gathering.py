"""All ranks of a script meet at the first update of an optimizer before a watch of it is opened, or none opens one.

Opening a watch is collective, so a rank must not begin it unless all ranks do. Not every right script trains on every
rank: a learner updates weights while actors wait for them in a broadcast. So a rank that comes to an update waits for
the others in the store, where it disturbs no collective of the script, and gives up if they do not come. The ranks
decide by one value that the store sets once: a rank that comes later reads it and does not wait.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
import time
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from andon_contracts.liveness.halt import own_store
from andon_contracts.stacks import doing
from andon_contracts.watch.values import text_digest

_LONGEST_S = 120.0
"""How long a rank waits for all others at a first update, but at most a third of their group's timeout."""
_AGAIN_S = 5.0
"""How long it waits the second time. After that it opens no watch any more."""
_LOOK_S = 0.1
_SURE_S = 3.0
"""How long a rank waits before it believes a report that another one waits elsewhere: that wait may just be over."""
_BEAT_S = 1.0
"""How often a rank looks where its main thread is."""
_STUCK_S, _BUSY_S = 5.0, 0.1
"""A rank waits in a collective if it is in one call for so long and computes less between two looks."""
_scripts = itertools.count()
"""Numbers the scripts of this process, which have the same numbers on all ranks."""


class Gathering:
    """The meetings of the ranks of one script, and a thread that tells the others if this rank waits elsewhere."""

    def __init__(self) -> None:
        self._name = f"standby/{next(_scripts)}"
        self._round = 0
        self._patience = [_LONGEST_S, _AGAIN_S]
        self._over = threading.Event()
        self._main = threading.get_ident()
        # A single process has no peers to inform, and a thread would make a later fork unsafe.
        self._thread = threading.Thread(target=self._tell_where, name="andon-standby", daemon=True)
        if os.environ.get("WORLD_SIZE", "1") != "1":
            self._thread.start()

    def close(self) -> None:
        """Tell the others that the script has ended."""
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join(1.0)

    def is_first(self, text: str) -> bool:
        """True on the first rank that asks about this text, so that one rank says what several found."""
        with suppress(RuntimeError, ValueError):
            store = own_store(self._name)
            return store is None or store.add(f"said/{text_digest(text)}", 1) == 1
        return True

    def meet(self, what: str, refuses: str = "") -> str | None:
        """Meet the others at an update of `what`; None if all ranks are here, else why no watch is to be opened.

        refuses: why this rank cannot open one, which the others are told. After the last attempt this returns "".
        """
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
            return refuses or None
        if not self._patience:
            return refuses
        try:
            store = own_store(self._name)
            assert store is not None
            while True:
                key, self._round = f"{self._round}", self._round + 1
                late = store.check([f"{key}/verdict"])
                store.set(f"{key}/here/{dist.get_rank()}", what)
                verdict = _agreed(store, key, what, refuses) if refuses else self._await(store, key, what)
                given_up, why = json.loads(verdict)
                # If the others gave up on an optimizer that this rank does not have, all meet again at the next one.
                if not (late and why and given_up != what):
                    return str(why) or None
        except (RuntimeError, ValueError, TypeError) as error:
            self._patience.clear()
            return f"the ranks' store does not answer ({type(error).__name__})"

    def _await(self, store: Store, key: str, what: str) -> str:
        """Wait for all other ranks together, against one deadline; returns the verdict."""
        began, ranks = time.monotonic(), range(dist.get_world_size())
        patience = min(self._patience[0], _timeout_of_group_s() / 3)
        while True:
            if store.check([f"{key}/verdict"]):
                return bytes(store.get(f"{key}/verdict")).decode()
            if store.check([f"{key}/here/{rank}" for rank in ranks]):
                return _agreed(store, key, what, "")
            waited = time.monotonic() - began
            if waited > min(_SURE_S, patience):
                others = [rank for rank in ranks if not store.check([f"{key}/here/{rank}"])]
                away = {r: bytes(store.get(f"away/{r}")).decode() for r in others if store.check([f"away/{r}"])}
                elsewhere = [f"rank {rank} {away[rank]}" for rank in others if away.get(rank)]
                if others and (waited > patience or len(elsewhere) == len(others)):
                    del self._patience[0]
                    if not self._patience:
                        store.set(f"away/{dist.get_rank()}", "has given up waiting for the others")
                    missing = f"rank {', '.join(map(str, others))} did not come to the first update of {what}"
                    seen = f" ({'; '.join(elsewhere)})" if elsewhere else f" within {waited:.0f} s"
                    return _agreed(store, key, what, missing + seen)
            time.sleep(_LOOK_S)

    def _tell_where(self) -> None:
        """The thread: tell the other ranks while the main thread waits in a collective, and when the script is over."""
        told, last, computed, since = "", None, 0.0, time.monotonic()
        clock = time.pthread_getcpuclockid(self._main)
        store: Store | None = None
        while True:
            over = self._over.wait(_BEAT_S)
            here, before, computed = _in_collective(self._main), computed, time.clock_gettime(clock)
            if here != last or computed - before > _BUSY_S:
                last, since = here, time.monotonic()
            stuck = here is not None and time.monotonic() - since >= _STUCK_S
            text = "has ended its script" if over else f"waits {doing(self._main)}" if stuck else ""
            with suppress(RuntimeError, ValueError):  # without the store nobody is left who would ask
                if text != told and (store := store or own_store(self._name)) is not None:
                    store.set(f"away/{dist.get_rank()}", text)
                    told = text
            if over:
                return


def _agreed(store: Store, key: str, what: str, why: str) -> str:
    """The verdict of a meeting: this one, unless another rank was faster."""
    return bytes(store.compare_set(f"{key}/verdict", "", json.dumps([what, why]))).decode()


def _in_collective(ident: int) -> tuple[int, int] | None:
    """Identifies the call of `torch.distributed` that the thread is in; None if it is in none."""
    frame: Any = sys._current_frames().get(ident)
    if frame is None or not str(frame.f_globals.get("__name__", "")).startswith("torch.distributed"):
        return None
    return id(frame), frame.f_lasti


def _timeout_of_group_s() -> float:
    """How long the script's own collectives wait, the least of all kinds of devices."""
    group = dist.distributed_c10d._get_default_group()
    found = [30 * 60.0]
    for kind in ("cpu", "cuda"):
        with suppress(RuntimeError, AttributeError):  # the group has no backend for it, or one without a timeout
            found.append(group._get_backend(torch.device(kind)).options._timeout.total_seconds())
    return min(found)
