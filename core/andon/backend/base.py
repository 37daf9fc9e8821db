"""The verbs that the step asks of a backend, and the backend that notes on a rank's clock when it waits for the others.

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
        """work(local index) for each local replica, at once where the backend can. Raises what it raised."""
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


class Clock(Protocol):
    """Who is told."""

    def wait(self) -> None:
        """A collective begins."""
        ...

    def work(self) -> None:
        """It is over; not called where it raised."""
        ...


class ClockedBackend:
    """All verbs of the backend that it is given, collectives between two notes on the clock."""

    def __init__(self, backend: Backend, clock: Clock) -> None:
        self._backend, self._clock = backend, clock
        self.name, self.world_size = backend.name, backend.world_size
        self.ranks, self.devices = backend.ranks, backend.devices

    def map(self, work: Callable[[int], T]) -> list[T]:
        """As the backend does it."""
        return self._backend.map(work)

    def gather(self, local: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """As the backend does it, noted."""
        self._clock.wait()
        found = self._backend.gather(local)
        self._clock.work()
        return found

    def exchange(self, local: Sequence[torch.Tensor], rows: Sequence[int]) -> list[list[torch.Tensor]]:
        """As the backend does it, noted."""
        self._clock.wait()
        found = self._backend.exchange(local, rows)
        self._clock.work()
        return found

    def close(self) -> None:
        """As the backend does it."""
        self._backend.close()
