"""Real ranks: processes from a fork server in one gloo group, without a port, each with an answer or an end."""

from __future__ import annotations

import datetime
import faulthandler
import gc
import multiprocessing
import multiprocessing.util
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

DEADLINE_S = 60.0
_CONTEXT = multiprocessing.get_context("forkserver")
# The server imports them once and starts no thread, so that forking it is safe and a rank is there in milliseconds.
# Every optimizer imports `torch._dynamo`, which takes as long as torch itself.
_CONTEXT.set_forkserver_preload(
    [
        *("torch", "torch.distributed", "torch._dynamo", "torch.distributed.fsdp"),
        *("icontract", "pytest", "hypothesis", "andon_contracts.watch.opening"),
    ]
)

Work = Callable[..., Any]


@dataclass(frozen=True)
class Outcome:
    value: Any = None
    error: BaseException | None = None

    def get(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.value


def run_ranks(
    world: int, work: Work, *args: Any, deadline_s: float = DEADLINE_S, backend: str = "gloo"
) -> list[Outcome]:
    """work(*args) in each of `world` ranks of a group of their own; the outcomes by rank.

    `work` is a function of a module that a new process can import. Ranks that have not answered after `deadline_s`
    are killed, by pid, and have a `TimeoutError` as their outcome.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        started = [_start(rank, world, store, deadline_s, backend, work, args) for rank in range(world)]
        try:
            return _collect({rank: reader for rank, (_, reader) in enumerate(started)}, deadline_s)
        finally:
            for process, reader in started:
                _end(process)
                reader.close()


def _start(
    rank: int, world: int, store: Path, deadline_s: float, backend: str, work: Work, args: tuple[Any, ...]
) -> tuple[BaseProcess, Connection]:
    reader, writer = _CONTEXT.Pipe(duplex=False)
    given = (rank, world, str(store), deadline_s, backend, writer, work, args)
    process = _CONTEXT.Process(target=_rank, args=given, daemon=True)
    process.start()
    writer.close()
    return process, reader


def _collect(readers: Mapping[int, Connection], deadline_s: float) -> list[Outcome]:
    deadline = time.monotonic() + deadline_s
    found: dict[int, Outcome] = {}
    while len(found) < len(readers):
        waiting = {reader: rank for rank, reader in readers.items() if rank not in found}
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for reader in ready:
            assert isinstance(reader, Connection)
            found[waiting[reader]] = _read(reader)
    late = Outcome(error=TimeoutError(f"no answer within {deadline_s} s"))
    return [found.get(rank, late) for rank in readers]


def _read(reader: Connection) -> Outcome:
    try:
        outcome = pickle.loads(reader.recv_bytes())  # our own ranks wrote it
    except EOFError:
        return Outcome(error=ChildProcessError("the rank ended without an answer"))
    assert isinstance(outcome, Outcome)
    return outcome


def _end(process: BaseProcess) -> None:
    process.join(5.0)
    if process.is_alive():
        process.kill()
        process.join()


def _rank(
    rank: int,
    world: int,
    store: str,
    deadline_s: float,
    backend: str,
    writer: Connection,
    work: Work,
    args: tuple[Any, ...],
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    # A watch reads the collector's list of objects several times; those of the libraries take most of the time.
    gc.freeze()
    # Where a rank hangs is worth more than that it hangs.
    faulthandler.dump_traceback_later(0.9 * deadline_s, file=sys.__stderr__)
    timeout = datetime.timedelta(seconds=deadline_s)
    try:
        dist.init_process_group(
            backend, store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=timeout
        )
        outcome = Outcome(work(*args))
    except BaseException as error:  # noqa: BLE001 - whatever it is, the test is told
        error.add_note(f"on rank {rank}:\n{traceback.format_exc()}")
        outcome = Outcome(error=error)
    try:
        writer.send_bytes(pickle.dumps(outcome))
    except Exception as error:  # noqa: BLE001 - an outcome that cannot be pickled is still an outcome
        writer.send_bytes(pickle.dumps(Outcome(error=RuntimeError(f"{error}: {outcome}"))))
    writer.close()
    with suppress(RuntimeError):
        if dist.is_initialized():
            dist.destroy_process_group()
    # What multiprocessing itself would call: an open watch says that this rank left, so that none takes it for dead.
    multiprocessing.util._exit_function()  # type: ignore[attr-defined]
    # After a gloo error an ordinary exit may end in SIGABRT.
    os._exit(0)
