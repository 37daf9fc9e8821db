"""The life of one rank: join the group, answer one request after the other, leave when the pipe closes."""

from __future__ import annotations

import datetime
import importlib
import os
import pickle
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

GROUP_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Answer:
    """What a rank returned, or the text of what it raised. `usable`: whether it can be asked again."""

    value: Any = None
    error: str = ""
    usable: bool = True


def live(rank: int, world: int, store: str, pipe: Connection) -> None:
    """The whole life of rank `rank` of `world`; `store` is the path of the group's file, `pipe` leads to the suite."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=GROUP_TIMEOUT_S)
    shared = dist.FileStore(store, world)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=shared, rank=rank, world_size=world, timeout=timeout)
    served = 0
    while True:
        try:
            work, argument = pickle.loads(pipe.recv_bytes())  # the suite is the only one who writes here
        except EOFError:
            # After an error of gloo an ordinary exit may end in SIGABRT.
            os._exit(0)
        served += 1
        answer = _answer(work, argument, served)
        pipe.send_bytes(pickle.dumps(answer))


def _answer(work: str, argument: Any, served: int) -> Answer:
    """The answer to one request, with the sentinel behind it: all ranks have answered equally often and are clean."""
    module, _, name = work.partition(":")
    try:
        value = getattr(importlib.import_module(module), name)(argument)
        _sentinel(served)
    except Exception as error:  # noqa: BLE001 -- whatever it is, the suite is told
        return Answer(error=f"{type(error).__name__}: {error}\n{traceback.format_exc()}", usable=False)
    return Answer(value)


def _sentinel(served: int) -> None:
    """Raises `RuntimeError` where ranks lost step with each other or a case left contracts switched off."""
    import torch
    import torch.distributed as dist

    from andon_contracts.policy import enforced

    counts = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    counts[dist.get_rank()] = served
    dist.all_reduce(counts)
    if counts.tolist() != [served] * len(counts) or not enforced():
        msg = f"after request {served} the ranks stand at {counts.tolist()}, contracts enforced: {enforced()}"
        raise RuntimeError(msg)
