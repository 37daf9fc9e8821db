"""Counts of tensor bytes: live storages, and what autograd saves of one micro-batch."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from andon.step.micro_batch import Batch, Task


class StorageMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context manager: counts every storage that operations of this thread read or make, once, while it lives.

    live: bytes now. peak: the most so far. Not counted: what a kernel allocates and frees within one operation, and a
    storage that no operation has touched since `adopt`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak = 0
        self._held: dict[int, int] = {}
        # Reentrant: a storage may be freed while another one is entered.
        self._lock = threading.RLock()

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count what exists before the first operation."""
        for tensor in tensors:
            if tensor.layout != torch.strided or tensor.device.type == "meta":
                continue
            storage = tensor.untyped_storage()
            address, size = storage._cdata, storage.nbytes()
            with self._lock:
                if address in self._held:
                    continue
                self._held[address] = size
                self.live += size
                self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._leave, address).atexit = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.adopt(value for value in tree_iter((args, kwargs, result)) if isinstance(value, torch.Tensor))
        return result

    def _leave(self, address: int) -> None:
        with self._lock:
            self.live -= self._held.pop(address, 0)


def activation_bytes(model: nn.Module, task: Task, batch: Batch) -> int:
    """Bytes that forward and backward of `batch` add to the weights, by one forward pass in training mode.

    What autograd saves (without weights, each storage once), the batch, and twice the largest saved tensor, for the
    gradients in transit. Restores the CPU generator and the model's mode.
    """
    weights = {tensor.untyped_storage()._cdata for tensor in [*model.parameters(), *model.buffers()]}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            saved[storage._cdata] = storage.nbytes()
        return tensor

    training = model.training
    model.train()
    try:
        with torch.random.fork_rng(devices=[]), torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
            loss = task.loss_sum(model, batch)
            held = sum(saved.values())
            del loss
    finally:
        model.train(training)
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in batch.values()}
    return held + sum(storages.values()) + 2 * max(saved.values(), default=0)
