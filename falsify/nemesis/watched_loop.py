"""One rank of a loop under `andon.watch`, for an attack: `torchrun ... -m falsify.nemesis.watched_loop FOLDER`.

After half of its updates it waits for `go` in the folder, while the attack runs. After `quiet`, rank 1 changes its
model and then halts all ranks. `rank-N.json` says what rank N noticed of both.
"""

from __future__ import annotations

import hashlib
import json
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

STEPS = 40
PATIENCE_S = 120.0
REASON = "it is enough"


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    ddp, optimizer = nn.parallel.DistributedDataParallel(model), torch.optim.SGD(model.parameters(), lr=0.01)
    found: list[object] = []
    with andon.watch(ddp, optimizer, action="warn", log=found.append) as watch:
        for step in range(STEPS):
            if step == STEPS // 2:
                (folder / f"port-{rank}").write_text(os.environ["MASTER_PORT"])
                _until((folder / "go").exists)
            _update(ddp, optimizer, step + rank)
        weights = torch.cat([each.detach().flatten() for each in model.parameters()]).numpy().tobytes()
        (folder / f"weights-{rank}").write_text(hashlib.sha256(weights).hexdigest())
        _until((folder / "quiet").exists)
        before = len(found)
        if rank == 1:
            with torch.no_grad():
                model.bias.add_(1.0)
        _update(ddp, optimizer, 0)
        report = {"before": found[:before], "found": found[before:], "woken": ""}
        try:
            if rank == 1:
                watch.pull(REASON)
            threading.Event().wait(PATIENCE_S)
        except andon.Violation as error:
            report["woken"] = str(error)
            raise
        finally:
            (folder / f"rank-{rank}.json").write_text(json.dumps(report, default=str))


def _update(model: nn.Module, optimizer: torch.optim.Optimizer, fill: int) -> None:
    optimizer.zero_grad()
    model(torch.full((2, 3), float(fill % 5))).square().mean().backward()
    optimizer.step()


def _until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not what():
        if time.monotonic() > deadline:
            raise TimeoutError("nobody says how to go on")
        time.sleep(0.01)


if __name__ == "__main__":
    main()
