"""All ranks in this process, one after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

T = TypeVar("T")


class InlineBackend:
    """Replicas in turn. The simplest backend, and the best one for debugging."""

    name = "inline"

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = tuple(devices)
        self.world_size = len(self.devices)
        self.ranks = tuple(range(self.world_size))

    def map(self, work: Callable[[int], T]) -> list[T]:
        return [work(index) for index in self.ranks]

    def gather(self, local: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [tensor.to(self.devices[0]) for tensor in local]

    def exchange(self, local: Sequence[torch.Tensor], rows: Sequence[int]) -> list[list[torch.Tensor]]:
        """The transposed list of lists."""
        return [[sent[index].to(device) for sent in local] for index, device in enumerate(self.devices)]

    def close(self) -> None:
        """Nothing is held."""
