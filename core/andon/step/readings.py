"""Values that a device computes and the host is to read: at once, or when the device has come to them.

Reading a value of a GPU makes the host wait until everything before it is done, and the GPU is idle until the host has
caught up. A late reading is copied into pinned memory behind the work that computes it, and read a step later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from andon.backend.base import Backend

Then = Callable[[torch.Tensor], None]


def reads_late(backend: Backend) -> bool:
    """Whether the replicas of `backend` are all on GPUs, so that nobody has to wait for values in the middle of a step.

    In `mixed` what ranks tell each other goes through the CPU, where it is read at once.
    """
    return backend.name != "mixed" and all(device.type == "cuda" for device in backend.devices)


def on_device(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """int64 [len(values)] on `device`; a GPU gets them from pinned memory, so that nobody waits for the copy."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=torch.int64, device=device)
    return torch.tensor(values, dtype=torch.int64, pin_memory=True).to(device, non_blocking=True)


class Readings:
    """What the host is to read of one step, in order. `late`: not before `settle`."""

    def __init__(self, *, late: bool) -> None:
        self.late = late
        self._waiting: list[tuple[torch.Tensor, Then]] = []
        self._device: torch.device | None = None
        self._copied: torch.cuda.Event | None = None

    def read(self, tensor: torch.Tensor, then: Then) -> None:
        """Call `then` with the values of `tensor`, on the CPU: now, or in `settle`; it raises what `then` raises."""
        if not self.late:
            then(tensor.cpu())
            return
        if tensor.device.type != "cuda":
            self._waiting.append((tensor.clone(), then))
            return
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        copy.copy_(tensor, non_blocking=True)
        self._waiting.append((copy, then))
        self._device = tensor.device

    def end(self) -> None:
        """After the last reading: mark how far the device has to come."""
        if self._device is not None:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(self._device))

    def settle(self) -> None:
        """Wait for the device to have come to the last reading, then pass all on in order; once."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None
        waiting, self._waiting = self._waiting, []
        for values, then in waiting:
            then(values)
