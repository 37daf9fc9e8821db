"""Counts of tensor bytes: storages that live, and what autograd saves of one micro-batch."""

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
    """While active in a thread, counts every storage that its operations read or make, each once, while it lives.

    `live` is the count now, `peak` the most that it was. What a kernel allocates and frees within one operation is
    not seen, nor is a storage that no operation has touched since `adopt`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak = 0
        self._held: dict[int, int] = {}
        # Reentrant: a storage may be freed, and so reported, while another is being entered.
        self._lock = threading.RLock()

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count what is there before the first operation."""
        for tensor in tensors:
            self._enter(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        for value in tree_iter((args, kwargs, result)):
            if isinstance(value, torch.Tensor):
                self._enter(value)
        return result

    def _enter(self, tensor: torch.Tensor) -> None:
        if tensor.layout != torch.strided or tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        place, size = storage._cdata, storage.nbytes()
        with self._lock:
            if place in self._held:
                return
            self._held[place] = size
            self.live += size
            self.peak = max(self.peak, self.live)
        freed = weakref.finalize(storage, self._leave, place)
        freed.atexit = False

    def _leave(self, place: int) -> None:
        with self._lock:
            self.live -= self._held.pop(place, 0)


def activation_bytes(model: nn.Module, task: Task, batch: Batch) -> int:
    """Bytes that forward and backward of `batch` add to the weights: one dry forward in training mode, no backward.

    What autograd saves (weights aside, each storage once), the batch itself, and working room of twice the
    largest saved tensor, for the gradients on their way. Leaves the CPU generator and the model's mode as they were.
    """
    known = {tensor.untyped_storage()._cdata for tensor in [*model.parameters(), *model.buffers()]}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
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
