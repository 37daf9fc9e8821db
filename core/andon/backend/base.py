"""The operations that the step needs of a backend, and the backend with all ranks in this process.

Operations take and return lists indexed by *local replica*, unless a docstring says "by rank". In `inline` every rank
is local, in a process group only one is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch

T = TypeVar("T")


class Backend(Protocol):
    """Ranks and their collectives. ranks: the local ones. devices: the device of each local replica."""

    name: str
    world_size: int
    ranks: tuple[int, ...]
    devices: tuple[torch.device, ...]

    def map(self, work: Callable[[int], T]) -> list[T]:
        """work(local index) for each local replica, in order."""
        ...

    def gather(self, local: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """All-gather: every rank's tensor, by rank. All have one shape and dtype. local: by local replica."""
        ...

    def exchange(self, local: Sequence[torch.Tensor], rows: Sequence[int]) -> list[list[torch.Tensor]]:
        """All-to-all of bits; nothing is added.

        Rank r passes [world, rows[r], width]. Local replica d gets, by rank s, [rows[s], width].
        """
        ...

    def close(self) -> None:
        """Free the backend's resources. It cannot be used afterwards."""
        ...


class InlineBackend:
    """All ranks in this process, one after another: the simplest backend, and the best one for debugging."""

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
        return [[sent[index].to(device) for sent in local] for index, device in enumerate(self.devices)]

    def close(self) -> None: ...
