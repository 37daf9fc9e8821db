"""Precedes every script on its path: seeds it, records its updates, and gives it CPUs for GPUs.

REAL_CODE_NOTES: a folder where each process writes, at its end, the number of its updates and a checksum over all
weights after each update. REAL_CODE_CPU: whether a request for a GPU gets the CPU. Weights are only read.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import random
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

_RANK = int(os.environ.get("RANK", "0"))


class _Notes:
    def __init__(self, folder: Path) -> None:
        self.updates = 0
        self.checksum = 0
        self._path = folder / f"rank{_RANK}-{os.getpid()}.json"

    def updated(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        self.updates += 1
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                flat = local.detach().reshape(-1).contiguous()
                self.checksum = zlib.crc32(flat.view(torch.uint8).numpy(), self.checksum)

    def write(self) -> None:
        if self.updates:
            self._path.write_text(json.dumps({"updates": self.updates, "checksum": self.checksum}), encoding="utf-8")


def _seed() -> None:
    random.seed(_RANK)
    torch.manual_seed(_RANK)
    with suppress(ImportError):
        import numpy

        numpy.random.seed(_RANK)


def _cpu(given: Any) -> Any:
    gpu = isinstance(given, int) or (isinstance(given, str | torch.device) and str(given).startswith(("cuda", "cpu:")))
    return torch.device("cpu") if gpu and not isinstance(given, bool) else given


def _on_cpu(function: Any) -> Any:
    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        return function(args[0], *map(_cpu, args[1:]), **{name: _cpu(value) for name, value in kwargs.items()})

    return called


def _without(function: Any, *names: str) -> Any:
    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **{name: value for name, value in kwargs.items() if name not in names})

    return called


def _groups_on_gloo(function: Any) -> Any:
    @functools.wraps(function)
    def called(backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_id", None)
        return function("gloo" if backend is None or "nccl" in backend else backend, *args, **kwargs)

    return called


class _Done:
    """A finished collective: those of gloo have no `get_future`."""

    def wait(self) -> bool:
        return True

    def get_future(self) -> _Done:
        return self


def _of_gloo(function: Any) -> Any:
    """gloo has no mean, so the input is divided and summed. It has no futures either, so the call is synchronous."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("op") == dist.ReduceOp.AVG:
            args[-1].div_(dist.get_world_size())
            kwargs["op"] = dist.ReduceOp.SUM
        later = kwargs.pop("async_op", False)
        done = function(*args, **kwargs)
        return _Done() if later else done

    return called


def _gives(value: Any = None) -> Any:
    """A function that returns `value`, or its first argument. A new one per name: torch's compiler refuses aliases."""

    def called(*args: Any, **kwargs: object) -> Any:
        return args[0] if value is None else value

    return called


def _cpus_for_gpus() -> None:
    """Rank r's GPU is the CPU, with gloo for nccl. `torch.cuda.is_available()` stays as it is."""
    for kind in (torch.Tensor, torch.nn.Module):
        kind.to = _on_cpu(kind.to)
        kind.cuda = _gives()
    torch.Tensor.pin_memory = _gives()
    for name in ("set_device", "synchronize", "empty_cache", "max_memory_allocated", "reset_peak_memory_stats"):
        setattr(torch.cuda, name, _gives(0))
    torch.accelerator.is_available = _gives(True)
    torch.accelerator.device_count = _gives(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    torch.accelerator.current_accelerator = _gives(torch.device("cpu"))
    torch.accelerator.set_device_index = _gives(0)
    wrapper = torch.nn.parallel.DistributedDataParallel
    wrapper.__init__ = _without(wrapper.__init__, "device_ids", "output_device")
    dist.init_process_group = _groups_on_gloo(dist.init_process_group)
    for name in ("all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor"):
        setattr(dist, name, _of_gloo(getattr(dist, name)))
    dist.barrier = _without(dist.barrier, "device_ids")


_seed()
if os.environ.get("REAL_CODE_CPU"):
    _cpus_for_gpus()
if _folder := os.environ.get("REAL_CODE_NOTES"):
    _notes = _Notes(Path(_folder))
    register_optimizer_step_post_hook(_notes.updated)
    atexit.register(_notes.write)
