"""One rank: it joins its process group, answers one request after the other, and leaves when its pipe closes."""

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


@dataclass(frozen=True)
class Answer:
    """What a rank returned, or the text of its error. After an error the rank takes no further request."""

    value: Any = None
    error: str = ""


@dataclass(frozen=True)
class RankSpec:
    """suite: the pid of the process that asks. folder: for the store, temporary files, and what the rank prints."""

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


def serve(spec: RankSpec, pipe: Connection) -> None:
    """The whole life of a rank. Its first answer says that it has joined its group."""
    with spec.printed.open("a", encoding="utf-8") as printed:
        os.setsid()  # what it starts is found by its session
        die_with_parent(spec.suite)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the fork server blocks it
        temporary = Path(spec.folder) / "tmp"  # its files go with the folder, however the rank ends
        temporary.mkdir(exist_ok=True)
        os.environ["TMPDIR"] = tempfile.tempdir = str(temporary)
        _redirect(printed)
        _join(spec)
        pipe.send_bytes(pickle.dumps(Answer()))
        served = 0
        while True:
            try:
                work, argument = pickle.loads(pipe.recv_bytes())  # only the suite writes here
            except EOFError:
                # After an error of gloo an ordinary exit may end in SIGABRT.
                os._exit(0)
            served += 1
            _redirect(printed)
            faulthandler.dump_traceback_later(spec.deadline_s * 0.9, file=printed)  # in case it never answers
            answer = _answer(spec, work, argument, served)
            faulthandler.cancel_dump_traceback_later()
            pipe.send_bytes(answer)


def _redirect(printed: TextIO) -> None:
    for descriptor in (1, 2):
        os.dup2(printed.fileno(), descriptor)


def _join(spec: RankSpec) -> None:
    import torch
    import torch.distributed as dist

    from andon.backend.base import groups_of
    from andon.backend.devices import demand_determinism, look_at, of_all_ranks, refuse_unfit
    from andon_falsify.subjects.placing import devices_of

    torch.set_num_threads(1)
    devices = devices_of(spec.backend, spec.world)
    device, on_gpus = devices[spec.rank], any(each.type == "cuda" for each in devices)
    if on_gpus:
        demand_determinism(devices)  # before CUDA starts, and on every rank of a group with GPUs
    timeout = datetime.timedelta(seconds=max(20.0, spec.deadline_s / 2))  # of a collective on a loaded machine
    shared = dist.FileStore(str(Path(spec.folder) / "store"), spec.world)  # type: ignore[attr-defined]
    dist.init_process_group(
        groups_of(spec.backend), store=shared, rank=spec.rank, world_size=spec.world, timeout=timeout
    )
    if on_gpus:
        refuse_unfit(spec.backend, of_all_ranks(look_at(device.index or 0) if device.type == "cuda" else None), None)
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _answer(spec: RankSpec, work: str, argument: Any, served: int) -> bytes:
    module, _, name = work.partition(":")
    try:
        value = getattr(importlib.import_module(module), name)(argument)
        _require_order(spec, served)
        try:
            return pickle.dumps(Answer(value))
        except Exception as error:  # noqa: BLE001 -- pickle raises whatever the value's own code does
            text = f"its answer cannot be sent: {type(error).__name__}: {error}"
    except SystemExit as error:
        text = f"it left by sys.exit({error.code!r})"
    except Exception as error:  # noqa: BLE001 -- whatever it is, the suite receives it
        text = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
    return pickle.dumps(Answer(error=text))


def _require_order(spec: RankSpec, served: int) -> None:
    """Raises `RuntimeError` if ranks have served different numbers of requests, the group is another one, or a case
    left the contracts suspended."""
    import torch
    import torch.distributed as dist

    world = dist.get_world_size() if dist.is_initialized() else 0
    if world != spec.world:
        msg = f"it says it is one of {world} ranks, but {spec.world} were started" if world else "its group is gone"
        raise RuntimeError(msg)
    counts = torch.zeros(world, dtype=torch.int64)
    counts[dist.get_rank()] = served
    dist.all_reduce(counts)
    if counts.tolist() != [served] * len(counts) or not enforced():
        msg = f"after request {served} the ranks stand at {counts.tolist()}, contracts enforced: {enforced()}"
        raise RuntimeError(msg)
