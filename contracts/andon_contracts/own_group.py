"""Groups of our own over the ranks of the loop's, apart from torch's register of groups, and how they are let go.

Torch names a group of some of the ranks by these ranks and by how many groups there are, so that one that is made after
another was destroyed finds the addresses of that one in the store. The names here are used once.
"""

from __future__ import annotations

import ctypes
import datetime
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

_idle: list[Any] = []
"""Groups that this rank has done with, while others may still be reading what it sent last."""


def own_group(group: dist.ProcessGroup | None, timeout: datetime.timedelta) -> Any:
    """A gloo group of our own over the ranks of `group`, in their order; None where there is only this process.

    Collective on these ranks. Raises `ValueError` on a rank that is not one of `group`.
    """
    if not dist.is_available() or not dist.is_initialized():
        return None
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    if dist.get_rank() not in ranks:
        msg = f"andon.watch: rank {dist.get_rank()} is not one of the group, which has ranks {ranks}"
        raise ValueError(msg)
    shared = dist.distributed_c10d._get_default_store()
    name = "andon/group/" + ("all" if group is None else "-".join(map(str, ranks)))
    # Counted in the store: a process that takes another's place goes on with its number.
    number = shared.add(f"{name} of {dist.get_rank()}", 1)
    made = dist.ProcessGroupGloo(
        PrefixStore(f"{name}/{number}", shared), ranks.index(dist.get_rank()), len(ranks), timeout
    )
    # All ranks have come here, so that none reads from an older group any more.
    _idle.clear()
    return made


def let_go(group: Any, unfinished: Any) -> None:
    """Keep `group`, with its threads and connections, for no longer than until the next one is made.

    At once would be too early: gloo drops what it has sent and no other rank has received yet. unfinished: a collective
    that this rank began and did not wait for, if there is one; its group is kept for good, since the end of a group
    waits for its collectives.
    """
    if unfinished is None or unfinished.is_completed():
        _idle.append(group)
    else:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
