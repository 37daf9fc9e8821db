"""What a script reduces over all ranks before there is a watch, held to what the other ranks reduce.

Tensors of different sizes or types end a loop: gloo aborts the process, where Python can say no word any more. Ranks
tell each other what they have in their store, which confuses no collective of the loop: each comes to the n-th
reduction over all ranks, or the loop hangs by itself.
"""

from __future__ import annotations

import datetime
import itertools
import re

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from andon_contracts.liveness.halt import own_store

_MOST = 1000
"""So many reductions are compared. A script that has made no update by then may never make one."""
_TOGETHER = datetime.timedelta(seconds=30)
"""How long the others have to come to the same reduction. After that nothing more is compared."""
_scripts = itertools.count()
"""The scripts of this process that reduced something, which is as many on each rank."""
_TOLD = re.compile(rb"[0-9]{1,20} values of torch\.[a-z0-9_]{1,30}")


class FirstReductions:
    """The reductions over all ranks of one script, as they begin; of one thread at a time, as collectives are."""

    def __init__(self) -> None:
        self._begun = 0
        self._store: Store | None = None
        self._over = False

    def apart(self, tensor: torch.Tensor, group: object) -> list[str]:
        """What each rank is about to reduce, by rank, where that is not of one size and type; else nothing."""
        if self._over or not dist.is_initialized() or dist.get_world_size() == 1:
            return []
        if group is not None and group is not dist.group.WORLD:
            return []
        self._begun += 1
        self._over = self._begun == _MOST
        try:
            seen = self._told(f"{tensor.numel()} values of {tensor.dtype}".encode())
        except RuntimeError:  # a rank is elsewhere, or the store is gone: the loop goes on as it would alone
            self._over = True
            return []
        if len(set(seen)) == 1 or not all(_TOLD.fullmatch(each) for each in seen):
            return []
        self._over = True
        return [each.decode() for each in seen]

    def _told(self, mine: bytes) -> list[bytes]:
        self._store = self._store or own_store(f"first reductions/{next(_scripts)}")
        assert self._store is not None
        keys = [f"{self._begun}/{rank}" for rank in range(dist.get_world_size())]
        self._store.set(keys[dist.get_rank()], mine.decode())
        self._store.wait(keys, _TOGETHER)
        return [bytes(self._store.get(key)) for key in keys]
