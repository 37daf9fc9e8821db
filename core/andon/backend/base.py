"""The verbs that the step asks of a backend.

Every verb speaks of *local replicas*: all ranks in `inline`, one rank in a process group. Lists are
indexed by local replica where they go in and where they come out, unless a docstring says "by rank".
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
        """work(local index) for each local replica, in order. Raises what it raised."""
        ...

    def gather(self, local: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Each local replica's tensor in; every rank's out, by rank. Same shape and dtype on all ranks."""
        ...

    def exchange(self, local: Sequence[torch.Tensor], rows: Sequence[int]) -> list[list[torch.Tensor]]:
        """All-to-all of bits. Rank r passes [world, rows[r], width]; local replica d gets, by rank s, [rows[s], width].

        Nothing is added up: sums belong to the fixed tree.
        """
        ...

    def close(self) -> None:
        """Give back what the backend holds. It cannot be used afterwards."""
        ...
