"""One rank of a loop that is about to be stopped: started by `benchmarks.halts`, and by it alone.

Rank 1 does what it is told once all others are where they are told to be: in a collective that nobody else joins, in a
backward pass (one long operation, or many layers), in the data loader (a read that never returns), on a GPU behind
CUDA graphs that run for long.
"""

from __future__ import annotations

import argparse
import datetime
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import andon

CULPRIT = 1
REASON = "a row that no rank may train on"
_LONG = 6144
"""Rows and columns of the matrices whose product takes the backward pass ten seconds and more, on one thread."""
_LONG_ON_GPU, _PRODUCTS_ON_GPU = 16384, 150
"""The same, and how many products in a row take a GPU as long."""


class Blocked(Dataset[Tensor]):
    """Rows that never come."""

    def __init__(self, ready: Path) -> None:
        self._ready = ready

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        self._ready.touch()
        os.read(os.pipe()[0], 1)
        return torch.empty(0)


class LongBackward(torch.autograd.Function):
    """Nothing forwards; backwards one long matrix product, or a wait for those of a GPU, in which no Python runs."""

    @staticmethod
    def forward(context: Any, x: Tensor, ready: Path) -> Tensor:  # noqa: D102
        context.ready = ready
        return x.clone()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:  # noqa: D102
        context.ready.touch()
        if gradients[0].is_cuda:
            return gradients[0] * _many_products(gradients[0].device).item(), None
        big = torch.ones(_LONG, _LONG)
        return gradients[0] * (big @ big)[0, 0], None


def _many_products(device: torch.device) -> Tensor:
    big = torch.ones(_LONG_ON_GPU, _LONG_ON_GPU, device=device)
    out = torch.empty_like(big)
    for _ in range(_PRODUCTS_ON_GPU):
        torch.mm(big, big, out=out)
    return out[0, 0]


def in_collective(model: nn.Module, ready: Path) -> None:
    """Wait for a rank that does not come; with nccl, as one does, for the device."""
    ready.touch()
    sent = torch.ones(1, device=_device_of(model))
    dist.all_reduce(sent)
    sent.item()


def in_backward(model: nn.Module, ready: Path) -> None:
    """One long operation."""
    x = torch.ones(2, 64, device=_device_of(model))
    LongBackward.apply(model(x), ready).sum().backward()  # type: ignore[no-untyped-call]


def in_layers(model: nn.Module, ready: Path) -> None:
    """Layer after layer."""
    ready.touch()
    while True:
        model(torch.ones(256, 64, device=_device_of(model))).sum().backward()


def in_graph(model: nn.Module, ready: Path) -> None:
    """Wait for a GPU that replays graphs."""
    big = torch.ones(_LONG_ON_GPU, _LONG_ON_GPU, device=_device_of(model))
    out = big @ big
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.mm(big, big, out=out)
    ready.touch()
    for _ in range(_PRODUCTS_ON_GPU):
        graph.replay()
    torch.cuda.synchronize()


def in_loader(model: nn.Module, ready: Path) -> None:
    """The process of the loader waits for a row, and this one for the loader."""
    next(iter(DataLoader(Blocked(ready), num_workers=1)))


def in_reading(model: nn.Module, ready: Path) -> None:
    """A row is read in this process."""
    Blocked(ready)[0]


def _device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


PLACES = {
    "collective": in_collective,
    "backward": in_backward,
    "layers": in_layers,
    "graph": in_graph,
    "loader": in_loader,
    "reading": in_reading,
}


def end(watch: Any, cause: str) -> None:
    """Fail as rank 1 is told to; the other ranks hear of it."""
    if cause == "violation":
        watch.pull(REASON)
    if cause == "error":
        raise ValueError(REASON)
    if cause == "memory":
        torch.empty(1 << 60, dtype=torch.uint8)
    os.kill(os.getpid(), signal.SIGKILL if cause == "killed" else signal.SIGSTOP)


def main() -> None:
    """Join, watch, go where told; never returns by itself."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("places", help="by rank, separated by commas")
    parser.add_argument("cause")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--hard-stop", action="store_true")
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--timeout", type=float)
    parser.add_argument("--patience", type=float, default=30.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group(options.backend, timeout=datetime.timedelta(seconds=options.timeout))
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(16)))
    if options.backend == "nccl":
        torch.cuda.set_device(rank)
        model.cuda()
        dist.all_reduce(torch.ones(1, device="cuda"))  # so that what follows is a wait, and no setting up
    watch = andon.watch(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        hard_stop=options.hard_stop,
        folder=str(options.folder / "bundles"),
        patience=datetime.timedelta(seconds=options.patience),
    )
    (options.folder / f"pid-{rank}").write_text(str(os.getpid()))
    if rank != CULPRIT:
        PLACES[options.places.split(",")[rank]](model, options.folder / f"ready-{rank}")
        sys.exit(0)
    while not all((options.folder / f"ready-{other}").exists() for other in range(world) if other != CULPRIT):
        time.sleep(0.01)
    time.sleep(0.3)  # so that who is about to block does
    (options.folder / "began").write_text(repr(time.monotonic()))
    end(watch, options.cause)


if __name__ == "__main__":
    main()
