"""What keeps the update from being taken while the host does not know yet that a clause is broken.

The host judges a step once it has read what the ranks said of it. Where it reads a step later, the device looks first:
the same table, held against what must stand in it. What it finds closes the gate, and a closed gate makes this update
and all that follow do nothing, until the host has come to the table and raised what it found.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from enum import IntEnum

import torch

from andon_contracts.agree import signed
from andon_contracts.triton_kernels import has_triton

_FLOOR = 1e-30
_CLOSE = 1e-4
_FIXED = 1
_EXPONENT = 0x7FF0000000000000


class Rule(IntEnum):
    """What may stand in a place of a table besides one integer that is known."""

    ANY = 0
    SAME = 2
    """What rank 0 has there."""
    FINITE = 3
    """The bits of a finite fp64."""
    HELD = 4
    """What the device holds of the update before."""
    CLIPPED = 5
    """The bits of the fp64 norm that one clipping leaves of the one that stands ahead of it."""


Expected = Sequence[Sequence[int]]
"""By rank, what must stand in its message: an integer, or a `Rule` where none is known."""


def encoded(expected: Expected) -> list[int]:
    """All integers of `expected`, then all rules; `Gate.look` takes them as int64 [2, world, width]."""
    values = [0 if isinstance(value, Rule) else signed(value) for row in expected for value in row]
    return values + [int(value) if isinstance(value, Rule) else _FIXED for row in expected for value in row]


class Gate:
    """One flag on each device: 1 once anything was found. All ranks find the same, since they look at one table."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._closed = {device: torch.zeros((), device=device) for device in devices}

    def on(self, device: torch.device) -> torch.Tensor:
        """0-dim fp32 on `device`: 0 where updates may be taken, else 1."""
        return self._closed[device]

    @property
    def closed(self) -> torch.Tensor:
        """The flag on the first device, where tables are."""
        return next(iter(self._closed.values()))

    def open(self) -> None:
        """Let updates be taken again."""
        for flag in self._closed.values():
            flag.zero_()

    def close_if(self, broken: torch.Tensor) -> None:
        """Keep updates from being taken from here on if `broken` (0-dim bool, on the first device) is true."""
        self.closed.masked_fill_(broken, 1.0)
        self._spread()

    def look(
        self, table: torch.Tensor, expected: torch.Tensor, held: torch.Tensor | None = None, limit: float | None = None
    ) -> None:
        """Keep updates from being taken if anything in `table` (int64 [world, width]) is not as `expected` says.

        expected: see `encoded`. held: 0-dim int64 for `Rule.HELD`. limit: to which gradients were clipped.
        """
        wanted, rules = expected.view(2, *table.shape).unbind()
        kernel = _kernel() if table.is_cuda else None
        if kernel is None:
            self.closed.masked_fill_(broken(table, wanted, rules, held, limit), 1.0)
        else:
            kernel(table, wanted, rules, table if held is None else held, self.closed, limit)
        self._spread()

    def _spread(self) -> None:
        first, *others = self._closed.values()
        for flag in others:
            flag.copy_(first, non_blocking=True)


@functools.cache
def _kernel() -> Callable[..., None] | None:
    """The look in one launch; None where Triton is not installed."""
    if not has_triton():
        return None
    from andon.step.gate_cuda import close_on_device

    return close_on_device


def broken(
    table: torch.Tensor, wanted: torch.Tensor, rules: torch.Tensor, held: torch.Tensor | None, limit: float | None
) -> torch.Tensor:
    """0-dim bool on the device: whether anything in `table` is not as wanted. The kernel's law in plain operations."""
    first = table[:1]
    odd = (rules == _FIXED) & (table != wanted)
    odd |= (rules == Rule.SAME) & (table != first)
    odd |= (rules == Rule.FINITE) & ((table & _EXPONENT) == _EXPONENT)
    if held is not None:
        odd |= (rules == Rule.HELD) & (table != held)
    norm = torch.roll(table, 1, dims=1).view(torch.float64)
    left = table.contiguous().view(torch.float64)
    right = norm if limit is None else norm * (limit / (norm + 1e-6)).clamp(max=1.0)
    odd |= (rules == Rule.CLIPPED) & ((left - right).abs() <= _CLOSE * right + _FLOOR).logical_not()
    return odd.any()
