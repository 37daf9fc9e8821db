"""The verbs that the step needs of a backend.

All of them take and return lists indexed by *local replica*, unless a docstring says "by rank": in `inline` every rank
is local, in a process group only one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch

T = TypeVar("T")


class Backend(Protocol):
    """Where ranks live."""

    name: str
    world_size: int
    ranks: tuple[int, ...]
    """The ranks that live in this process."""
    devices: tuple[torch.device, ...]
    """The device of each local replica."""

    def map(self, work: Callable[[int], T]) -> list[T]:
        """work(local index) for each local replica, in order."""
        ...

    def gather(self, local: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Takes each local replica's tensor and returns every rank's, by rank. All have one shape and dtype."""
        ...

    def exchange(self, local: Sequence[torch.Tensor], rows: Sequence[int]) -> list[list[torch.Tensor]]:
        """All-to-all of bits; nothing is added.

        Rank r passes [world, rows[r], width]. Local replica d gets, by rank s, [rows[s], width].
        """
        ...

    def close(self) -> None:
        """Free what the backend holds. It cannot be used afterwards."""
        ...
