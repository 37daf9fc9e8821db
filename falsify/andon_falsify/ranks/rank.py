"""The life of one rank: join the group, answer one request after the other, leave when the pipe closes."""

from __future__ import annotations

import datetime
import faulthandler
import importlib
import os
import pickle
import signal
import tempfile
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TextIO

from andon.launch.context import die_with_parent
from andon_contracts.policy import enforced

GROUP_TIMEOUT_S = 20.0
"""What a collective may wait at least; half of the deadline where that is more, for a loaded machine."""
_STACK_AT = 0.9
"""At this share of the deadline a rank writes down where it is, for the case that it never answers."""


@dataclass(frozen=True)
class Answer:
    """What a rank returned, or the text of what it raised. `usable`: whether it can be asked again."""

    value: Any = None
    error: str = ""
    usable: bool = True


@dataclass(frozen=True)
class Berth:
    """Where a rank lives: its number, of how many; the suite's pid; the folder of the store and of what it prints.

    backend: which group the ranks are in, and on which devices.
    """

    rank: int
    world: int
    suite: int
    folder: str
    deadline_s: float
    backend: str = "gloo"

    @property
    def printed(self) -> Path:
        """What the rank has written to its standard streams."""
        return Path(self.folder) / f"rank-{self.rank}.txt"

    @property
    def temporary(self) -> Path:
        """Where the rank's temporary files lie, so that they go with the folder, however the rank ends."""
        return Path(self.folder) / "tmp"


def live(berth: Berth, pipe: Connection) -> None:
    """The whole life of the rank of `berth`; `pipe` leads to the suite. The first answer says that it is there."""
    with berth.printed.open("a", encoding="utf-8") as printed:
        _settle_in(berth, printed)
        _join(berth)
        pipe.send_bytes(pickle.dumps(Answer(os.getpid())))
        served = 0
        while True:
            try:
                work, argument = pickle.loads(pipe.recv_bytes())  # the suite is the only one who writes here
            except EOFError:
                # After an error of gloo an ordinary exit may end in SIGABRT.
                os._exit(0)
            served += 1
            _redirect(printed)
            faulthandler.dump_traceback_later(berth.deadline_s * _STACK_AT, file=printed)
            answer = _answer(berth, work, argument, served)
            faulthandler.cancel_dump_traceback_later()
            pipe.send_bytes(_pickled(answer))


def _settle_in(berth: Berth, printed: TextIO) -> None:
    """A session of its own, by which what it starts is found, no life after the suite's, and no files either."""
    os.setsid()
    die_with_parent(berth.suite)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the fork server holds it back
    berth.temporary.mkdir(exist_ok=True)
    os.environ["TMPDIR"] = tempfile.tempdir = str(berth.temporary)
    _redirect(printed)


def _redirect(printed: TextIO) -> None:
    """Let the standard streams lead to `printed`, whatever a case has done to them: not between the suite's lines."""
    for descriptor in (1, 2):
        os.dup2(printed.fileno(), descriptor)


def _join(berth: Berth) -> None:
    import torch
    import torch.distributed as dist

    from andon.backend.base import groups_of
    from andon.backend.devices import demand_determinism, look_at, of_all_ranks, refuse_unfit
    from andon_falsify.subjects.placing import devices_of

    torch.set_num_threads(1)
    devices = devices_of(berth.backend, berth.world)
    device, on_gpus = devices[berth.rank], any(each.type == "cuda" for each in devices)
    if on_gpus:
        demand_determinism(devices)  # before CUDA starts, and on every rank of a group with GPUs
    timeout = datetime.timedelta(seconds=max(GROUP_TIMEOUT_S, berth.deadline_s / 2))
    shared = dist.FileStore(str(Path(berth.folder) / "store"), berth.world)  # type: ignore[attr-defined]
    dist.init_process_group(
        groups_of(berth.backend), store=shared, rank=berth.rank, world_size=berth.world, timeout=timeout
    )
    if on_gpus:
        refuse_unfit(berth.backend, of_all_ranks(look_at(device.index or 0) if device.type == "cuda" else None), None)
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _answer(berth: Berth, work: str, argument: Any, served: int) -> Answer:
    """The answer to one request, with the sentinel behind it: all ranks have answered equally often and are clean."""
    module, _, name = work.partition(":")
    try:
        value = getattr(importlib.import_module(module), name)(argument)
        _sentinel(berth, served)
    except SystemExit as error:
        return Answer(error=f"it left by sys.exit({error.code!r})", usable=False)
    except Exception as error:  # noqa: BLE001 -- whatever it is, the suite is told
        return Answer(error=f"{type(error).__name__}: {error}\n{traceback.format_exc()}", usable=False)
    return Answer(value)


def _pickled(answer: Answer) -> bytes:
    try:
        return pickle.dumps(answer)
    except Exception as error:  # noqa: BLE001 -- pickle raises whatever the value's own code does
        return pickle.dumps(Answer(error=f"its answer cannot be sent: {type(error).__name__}: {error}", usable=False))


def _sentinel(berth: Berth, served: int) -> None:
    """Raises `RuntimeError` where ranks lost step, the group is another, or a case left contracts switched off."""
    import torch
    import torch.distributed as dist

    world = dist.get_world_size() if dist.is_initialized() else 0
    if world != berth.world:
        msg = f"it says it is one of {world} ranks, but {berth.world} were started" if world else "its group is gone"
        raise RuntimeError(msg)
    counts = torch.zeros(world, dtype=torch.int64)
    counts[dist.get_rank()] = served
    dist.all_reduce(counts)
    if counts.tolist() != [served] * len(counts) or not enforced():
        msg = f"after request {served} the ranks stand at {counts.tolist()}, contracts enforced: {enforced()}"
        raise RuntimeError(msg)
