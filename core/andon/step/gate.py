"""What keeps the update from being taken while the host does not know yet that a clause is broken.

The host judges a step once it has read what the ranks said of it. Where it reads a step later, the device looks first:
the same table, held against what must stand in it. What it finds closes the gate, and a closed gate makes this update
and all that follow do nothing, until the host has come to the table and raised what it found.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from andon_contracts.digest import has_triton, signed
from andon_contracts.laws.law import Rule, Rules
from andon_contracts.laws.update import FACTOR_STEP, NORM_FLOOR, Reduced

_FIXED = 1
_EXPONENT = 0x7FF0000000000000


Expected = Sequence[Sequence[int]]
"""By rank, what must stand in its message: an integer, or a `Rule` where none is known."""


def expected_row(rules: Rules, names: Sequence[str]) -> list[int]:
    """What `rules` ask of a message with the values of `names`, in their order."""
    return [rules.get(name, Rule.ANY) for name in names]


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
        self,
        table: torch.Tensor,
        expected: torch.Tensor,
        held: torch.Tensor | None = None,
        want: Reduced | None = None,
    ) -> None:
        """Keep updates from being taken if anything in `table` (int64 [world, width]) is not as `expected` says.

        expected: see `encoded`. held: 0-dim int64 for `Rule.PREVIOUS`. want: what the reduced gradient is held to, if
        a rule of any column is `Rule.MAJORITY` or `Rule.CLIPPED`; that rule then holds for all ranks.
        """
        wanted, rules = expected.view(2, *table.shape).unbind()
        kernel = _kernel() if table.is_cuda else None
        if kernel is None:
            self.closed.masked_fill_(broken(table, wanted, rules, held, want), 1.0)
        else:
            # A kernel takes no None; what it reads in the place of `held` no rule asks for.
            kernel(table, wanted, rules, table if held is None else held, self.closed, want)
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
    table: torch.Tensor,
    wanted: torch.Tensor,
    rules: torch.Tensor,
    held: torch.Tensor | None,
    want: Reduced | None = None,
) -> torch.Tensor:
    """0-dim bool on the device: whether anything in `table` is not as wanted. The kernel's law in plain operations."""
    first = table[:1]
    odd = (rules == _FIXED) & (table != wanted)
    odd |= (rules == Rule.SAME) & (table != first)
    odd |= (rules == Rule.FINITE) & ((table & _EXPONENT) == _EXPONENT)
    if held is not None:
        odd |= (rules == Rule.PREVIOUS) & (table != held)
    if want is not None:
        ahead = most(torch.roll(table, 1, dims=1))
        odd |= (rules == Rule.MAJORITY) & (table != ahead)
        norm = ahead.view(torch.float64)
        left = table.contiguous().view(torch.float64)
        # torch's own factor (`clip_grads_with_norm_`), with its 1e-6: what is expected is what that does.
        right = norm if want.limit is None else norm * (want.limit / (norm + 1e-6)).clamp(max=1.0)
        close = (left - right).abs() <= want.norm_tolerance * right + FACTOR_STEP * norm + NORM_FLOOR
        odd |= (rules == Rule.CLIPPED) & close.logical_not()
    return odd.any()


def most(table: torch.Tensor) -> torch.Tensor:
    """[1, width]: what most ranks have in each column; of several, that of the lowest rank (`agree.majority`)."""
    votes = (table.unsqueeze(1) == table).sum(1)
    return table.gather(0, votes.argmax(0, keepdim=True))
