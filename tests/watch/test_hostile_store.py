"""Somebody who is no rank writes into the store of a watch: the loop trains as if alone, and stays guarded."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import andon
from tests.launch.beating import own_store
from tests.support.hostile import Hostile

PATIENCE_S = 60.0
STEPS, AT = 8, 4
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo"])


def _until(what: Callable[[], object]) -> None:
    deadline, pause = time.monotonic() + PATIENCE_S, threading.Event()
    while not what():
        assert time.monotonic() < deadline, "it does not come"
        pause.wait(0.01)


def _train(rank: int, port: int, folder: str, disturbed: bool) -> None:
    """Rank 1 pulls the cord at the end, and rank 0, which sleeps then, says what it was woken up by."""
    beside = Path(folder)
    os.dup2(os.open(beside / f"said-{rank}", os.O_WRONLY | os.O_CREAT), 2)
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115 - for as long as the process lives
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    store = dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    ddp, optimizer = nn.parallel.DistributedDataParallel(model), torch.optim.SGD(model.parameters(), lr=0.1)
    with andon.watch(ddp, optimizer) as w:
        for step in range(STEPS):
            if step == AT and disturbed:
                (beside / f"held-{rank}").touch()
                _until(lambda: w._cord is not None and w._cord._link.checked.dropped > 3)
            optimizer.zero_grad()
            ddp(torch.full((2, 3), float(step + rank))).square().mean().backward()
            optimizer.step()
        torch.save(model.state_dict(), beside / f"weights-{rank}")
        _until((beside / "calm").exists)
        if rank == 1:
            w.pull("the end of it")
        try:
            threading.Event().wait(PATIENCE_S)
        except andon.Violation as error:
            (beside / "woken").write_text(str(error))
            raise


def _run(folder: Path, *, disturbed: bool) -> list[dict[str, torch.Tensor]]:
    """The weights of both ranks at the end."""
    folder.mkdir()
    kept = own_store()
    ranks = [
        _CONTEXT.Process(target=_train, args=(rank, kept.port, str(folder), disturbed), daemon=True)  # type: ignore[attr-defined]
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    if disturbed:
        hostile = Hostile(kept.port)  # type: ignore[attr-defined]
        _until(lambda: (folder / "held-0").exists() and (folder / "held-1").exists())
        assert hostile.spoil() == 3
        _until(lambda: hostile.spoil() and all((folder / f"weights-{rank}").exists() for rank in range(2)))
    else:
        _until(lambda: all((folder / f"weights-{rank}").exists() for rank in range(2)))
    (folder / "calm").touch()
    for process in ranks:
        process.join(PATIENCE_S)
        process.kill()
    assert (folder / "woken").read_text().startswith("rank 1 of 2 pulled the cord"), (folder / "said-0").read_text()
    return [torch.load(folder / f"weights-{rank}") for rank in range(2)]


def test_garbage_in_the_store_of_a_watch_changes_nothing(tmp_path: Path) -> None:
    """Both ranks end with the weights of an undisturbed run, still halt together, and say how much they dropped."""
    alone, together = _run(tmp_path / "alone", disturbed=False), _run(tmp_path / "disturbed", disturbed=True)
    for rank in range(2):
        assert all(torch.equal(together[rank][name], value) for name, value in alone[rank].items())
        assert f"andon: rank {rank} dropped " in (tmp_path / "disturbed" / f"said-{rank}").read_text()
        assert "dropped" not in (tmp_path / "alone" / f"said-{rank}").read_text()
