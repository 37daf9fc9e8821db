"""Where the ranks of a case run: a device for each, and why a case cannot be tried on this machine."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from andon.backend.devices import placement
from andon.config.schema import Run

CPU_BACKENDS = ("inline", "gloo")
GPU_BACKENDS = ("nccl", "mixed")
IN_A_GROUP = ("gloo", "nccl", "mixed")
"""Backends whose ranks are processes of one group."""


def devices_of(backend: str, world: int, gpus: int | None = None) -> tuple[torch.device, ...]:
    """The device of each rank. gpus: how many this machine has (None: ask torch).

    nccl: a GPU each. mixed: CPU and GPU in turn, so that one GPU is enough for 2 and 3 ranks; more ranks share GPUs,
    and without a GPU all are on the CPU. Other backends: the CPU. Raises `InputError` for nccl without enough GPUs.
    """
    cpu = torch.device("cpu")
    if backend not in GPU_BACKENDS:
        return (cpu,) * world
    count = torch.cuda.device_count() if gpus is None else gpus
    if backend == "nccl":
        return placement(Run(backend="nccl", workers=world, devices=tuple(range(world))), count)[1]
    return tuple(
        torch.device("cuda", rank // 2 % count) if rank % 2 and count else cpu  # ranks 1, 3, 5 on GPUs 0, 1, 2
        for rank in range(world)
    )


def why_not(backend: str, world: int = 1, gpus: int | None = None, nccl: bool | None = None) -> str:
    """Why `backend` cannot be tried here on `world` ranks, or "" if it can.

    gpus: how many GPUs there are. nccl: whether torch was built with NCCL. None: ask torch.
    """
    if backend not in GPU_BACKENDS:
        return ""
    count = torch.cuda.device_count() if gpus is None else gpus
    if count == 0:
        return f"{backend} needs a GPU, and this machine has none that torch can use"
    if backend == "nccl" and count < world:
        return f"nccl on {world} ranks needs {world} GPUs, and this machine has {count} that torch can use"
    if backend == "nccl" and not (dist.is_nccl_available() if nccl is None else nccl):
        return "nccl needs NCCL, and this torch was built without it"
    return ""


def room_for(backend: str, world: int, gpus: int | None = None) -> int:
    """The largest number of ranks up to `world` that `backend` can have here, at least one. gpus: see `devices_of`."""
    count = torch.cuda.device_count() if gpus is None else gpus
    return world if backend != "nccl" else max(1, min(world, count))


def place_of_bits(devices: Sequence[torch.device]) -> str:
    """What equal bits depend on: the ranks' one kind of device, or the kind of each rank."""
    kinds = [device.type for device in devices]
    return kinds[0] if len(set(kinds)) == 1 else " ".join(kinds)
