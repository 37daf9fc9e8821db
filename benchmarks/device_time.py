"""Time on a device: the host's clock with the device at rest, and marks among what the device has yet to do."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

Mark = torch.cuda.Event | float
"""A moment that the device comes to; on a CPU, where work is done once it is called, the host's clock in seconds."""


def rest(device: torch.device) -> None:
    """Wait until `device` has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def now(device: torch.device) -> float:
    """The host's clock in seconds, read with `device` at rest."""
    rest(device)
    return time.perf_counter()


def now_on_all(device: torch.device) -> float:
    """The same once every rank of the default group, where there is one, has come here with its device at rest."""
    rest(device)
    if dist.is_initialized():
        dist.barrier()
    return now(device)


def mark(device: torch.device) -> Mark:
    """A mark behind what was launched on the current stream of `device`, which is the current one."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def between(first: Mark, last: Mark) -> float:
    """Seconds from one mark to a later one of the same device. Raises `RuntimeError` if it has not come to both."""
    if isinstance(first, torch.cuda.Event):
        assert isinstance(last, torch.cuda.Event)
        return float(first.elapsed_time(last)) / 1e3
    assert isinstance(last, float)
    return last - first
