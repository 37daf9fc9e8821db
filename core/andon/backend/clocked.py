"""A backend that notes on a rank's clock when it waits for the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch

from andon.backend.base import Backend

T = TypeVar("T")


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

    def total(self, local: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """As the backend does it, noted."""
        self._clock.wait()
        found = self._backend.total(local)
        self._clock.work()
        return found

    def close(self) -> None:
        """As the backend does it."""
        self._backend.close()
