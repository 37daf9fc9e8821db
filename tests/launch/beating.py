"""Ranks with a heartbeat, as processes that meet in a store of the test's own, and what they do in a step."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from andon.launch.context import RankContext
from andon.launch.report import Report
from andon_contracts.liveness.process import Process
from tests.launch.pipes import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch._C._distributed_c10d import Store

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "torch.distributed", "andon.launch.heartbeat", "andon.launch.joining"])
STEPS, AT = 4, 3


class World:
    def __init__(self, folder: Path, port: int, size: int) -> None:
        self.folder, self._port, self.size = folder, port, size
        self.processes: dict[int, BaseProcess] = {}

    def start(self, ranks: Sequence[int], options: Mapping[str, Any]) -> World:
        for rank in ranks:
            given = (rank, self.size, self._port, str(self.folder), dict(options))
            self.processes[rank] = _CONTEXT.Process(target=_be, args=given, daemon=True)
            self.processes[rank].start()
        return self

    def ended(self, *ranks: int) -> list[Report]:
        found = []
        for rank in ranks:
            self.processes[rank].join(PATIENCE_S)
            report = Report.read(self.folder, rank)
            assert report is not None, f"rank {rank} left no report: {self.said(rank)}"
            found.append(report)
        return found

    def said(self, rank: int) -> str:
        return (self.folder / f"said-{rank}").read_text()

    def kill(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.join()


@contextmanager
def world(folder: Path, size: int, store: Store | None = None) -> Iterator[World]:
    """A world whose ranks are still to be started; they meet in `store`, or in one of its own."""
    kept: Any = own_store() if store is None else store
    made = World(folder, kept.port, size)
    try:
        yield made
    finally:
        made.kill()


def own_store() -> Store:
    from datetime import timedelta

    import torch.distributed as dist

    return dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=PATIENCE_S)
    )


def _be(rank: int, size: int, port: int, folder: str, options: Mapping[str, Any]) -> None:
    from andon.launch.rank import run_rank

    said = os.open(Path(folder) / f"said-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(said, 2)
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115 - for as long as the process lives
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ.update({name: str(number) for name, number in numbers.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RUN_ID="pulse")
    os.environ.update({"GLOO_SOCKET_IFNAME": "lo"} | options.get(f"variables of {rank}", {}))
    run_rank(lambda context: live(context, Path(folder), options), run_folder=Path(folder))


def live(context: RankContext, folder: Path, options: Mapping[str, Any]) -> int:
    """`STEPS` sums over gloo; in step `AT` this rank does what `options` say of it."""
    import torch
    import torch.distributed as dist

    from andon.launch.heartbeat import Heartbeat, Timeouts
    from andon.launch.joining import join
    from andon.launch.rank import end_now, watched_by
    from andon_contracts.liveness.diagnosis import UPDATE, StepClock

    timeout_s = options.get("timeout_s", PATIENCE_S)
    store, rank, size = join("gloo", timeout_s)
    clock, timeouts = StepClock(), Timeouts(options.get("bound_s", timeout_s), None, PATIENCE_S)
    watched_by(Heartbeat(store, rank, size, clock, timeouts, end_now))
    for step in range(1, STEPS + 1):
        clock.at(step, UPDATE)
        if step == AT:
            act(options.get(f"rank {rank}", ""), folder)
        ones = torch.ones(8)
        clock.wait()
        dist.all_reduce(ones)
        clock.work()
        assert torch.equal(ones, torch.full((8,), float(size)))
    return 0


def act(what: str, folder: Path) -> None:
    """Hang, dawdle until another rank has said so, stop, die, or fail."""
    if what == "hangs":
        hang_here()
    if what == "dawdles":
        pause = threading.Event()
        while not any("slow" in said.read_text() for said in folder.glob("said-*")):
            pause.wait(0.02)
    if what in ("SIGKILL", "SIGSTOP"):
        os.kill(os.getpid(), getattr(signal, what))
    if what == "is unguarded":
        Process.state = _cannot_look  # type: ignore[method-assign]
        hang_here()
    if what == "fails":
        raise LookupError("its own error")


def _cannot_look(process: Process) -> str:
    if not process.machine:  # the agent, which is known by its pid alone
        raise LookupError("nobody foresaw this")
    return "runs"


def hang_here() -> None:
    threading.Event().wait()
