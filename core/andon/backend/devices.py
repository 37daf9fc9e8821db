"""What a list of devices means, and what to do where there is none: said, never silent (F-DP-004)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from andon.problems import InputError, ProblemList

IN_PROCESS = ("inline", "threads")
IN_GROUP = ("gloo", "nccl", "mixed")


def named_devices(names: Sequence[str | int], gpus: int | None = None) -> tuple[torch.device, ...]:
    """Devices from names: `cpu`, or the index of a GPU (`0`, `cuda:0`). gpus: how many there are (None: ask torch).

    Raises `InputError` with all that is wrong: a name that is none, a GPU that does not exist, a GPU named twice (the
    CPU may be: several replicas can live on it).
    """
    found = ProblemList()
    count = torch.cuda.device_count() if gpus is None else gpus
    devices: list[torch.device] = []
    for place, name in enumerate(names):
        where = f"run.devices[{place}]"
        device = _device(name)
        if device is None:
            found.add(where, f"{name!r} is no device; write cpu, or the index of a GPU")
        elif device.type == "cuda" and not 0 <= (device.index or 0) < count:
            found.add(where, f"there is no GPU {device.index or 0}; this machine has {count}")
        elif device.type == "cuda" and device in devices:
            found.add(where, f"GPU {device.index} is named twice; a GPU holds one replica")
        else:
            devices.append(device)
    found.raise_if_any()
    return tuple(devices)


def _device(name: str | int) -> torch.device | None:
    text = str(name).strip()
    if text.lstrip("-").isdigit():
        index = int(text)
        return torch.device("cuda", index) if index >= 0 else None
    try:
        device = torch.device(text)
    except RuntimeError:
        return None
    if device.type == "cuda":
        return torch.device("cuda", device.index or 0)
    return torch.device("cpu") if device.type == "cpu" else None


def placement(
    backend: str, workers: int, names: Sequence[str | int] | None, gpus: int | None = None
) -> tuple[str, tuple[torch.device, ...], str]:
    """Where `workers` replicas live: the backend to use, a device for each, and what to tell the user (or "").

    `nccl` without named devices falls back to `gloo` on the CPU where there is no GPU at all; with some GPUs but too
    few, or with a named device that is none, it raises `InputError`. gpus: how many there are (None: ask torch).
    """
    cpu = torch.device("cpu")
    if names:
        devices = named_devices(names, gpus)
        if len(devices) != workers:
            raise InputError(f"run.devices: {len(devices)} devices for {workers} workers")
        if backend == "nccl" and cpu in devices:
            raise InputError("run.devices: nccl needs a GPU for each worker, not cpu; for both kinds there is mixed")
        return backend, devices, ""
    count = torch.cuda.device_count() if gpus is None else gpus
    if backend == "nccl":
        if count == 0:
            note = "no GPU is usable here: training on the CPU with gloo instead of nccl (clause cpu-fallback)"
            return "gloo", (cpu,) * workers, note
        if count < workers:
            raise InputError(f"run.workers: {workers} workers for {count} GPUs; nccl needs one GPU each")
        return backend, tuple(torch.device("cuda", index) for index in range(workers)), ""
    if backend == "mixed" and count:
        accelerators = tuple(torch.device("cuda", index) for index in range(min(count, workers - 1)))
        return backend, accelerators + (cpu,) * (workers - len(accelerators)), ""
    return backend, (cpu,) * workers, ""
