"""Device-side veto: skips the optimizer step if the gathered table breaks a contract, before the host has read it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from andon_contracts.digest import has_triton
from andon_contracts.laws.law import Rule
from andon_contracts.laws.update import FACTOR_STEP, NORM_FLOOR, Reduced

FIXED = 1  # in addition to the codes of `Rule`: the value must equal one known integer
_EXPONENT = 0x7FF0000000000000


class Gate:
    """One flag per device: 1 after a table broke a rule. While the gate is closed, the optimizer changes nothing.

    Invariant: the gate closes for exactly the tables that break a law on the host. If it closed for fewer, a GPU would
    apply an update that the host rejects only a step later. If it closed for more, the host would find no reason for
    the missing update (`step._refuse_closed` raises then). So the rules come from the laws themselves
    (`message.Field.law`), and tests compare both on random tables.

    A closed gate stays closed: updates launched after a broken one do nothing until the host has read the table and
    raised. All ranks have the same table, so their gates agree without another collective.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._closed = {device: torch.zeros((), device=device) for device in devices}

    def on(self, device: torch.device) -> torch.Tensor:
        """0-dim fp32 on `device`: 0 if updates may be applied, else 1."""
        return self._closed[device]

    @property
    def closed(self) -> torch.Tensor:
        """The flag on the first device, where the tables are."""
        return next(iter(self._closed.values()))

    def open(self) -> None:
        for flag in self._closed.values():
            flag.zero_()

    def close_if(self, broken: torch.Tensor) -> None:
        """Close if `broken` (0-dim bool on the first device) is true."""
        self.closed.masked_fill_(broken, 1.0)
        self._spread()

    def look(
        self, table: torch.Tensor, expected: torch.Tensor, held: torch.Tensor | None = None, want: Reduced | None = None
    ) -> None:
        """Close if any value in `table` (int64 [world, width]) breaks its rule in `expected` (`message.encoded`).

        held: 0-dim int64 for `Rule.PREVIOUS`. want: the clipping limits, for `Rule.MAJORITY` and `Rule.CLIPPED`.
        """
        wanted, rules = expected.view(2, *table.shape).unbind()
        if table.is_cuda and has_triton():
            from andon.step.gate_cuda import close_on_device

            # The kernel cannot take None. Without `Rule.PREVIOUS` in `rules` it ignores this value.
            close_on_device(table, wanted, rules, table if held is None else held, self.closed, want)
        else:
            self.closed.masked_fill_(broken(table, wanted, rules, held, want), 1.0)
        self._spread()

    def _spread(self) -> None:
        first, *others = self._closed.values()
        for flag in others:
            flag.copy_(first, non_blocking=True)


def broken(
    table: torch.Tensor,
    wanted: torch.Tensor,
    rules: torch.Tensor,
    held: torch.Tensor | None,
    want: Reduced | None = None,
) -> torch.Tensor:
    """0-dim bool on the device: whether any value in `table` breaks its rule. The Triton kernel must agree."""
    violated = (rules == FIXED) & (table != wanted)
    violated |= (rules == Rule.SAME) & (table != table[:1])
    violated |= (rules == Rule.FINITE) & ((table & _EXPONENT) == _EXPONENT)
    if held is not None:
        violated |= (rules == Rule.PREVIOUS) & (table != held)
    if want is not None:
        majority = most(torch.roll(table, 1, dims=1))
        violated |= (rules == Rule.MAJORITY) & (table != majority)
        norm = majority.view(torch.float64)
        left = table.contiguous().view(torch.float64)
        # The factor of `clip_grads_with_norm_`, with its 1e-6.
        right = norm if want.limit is None else norm * (want.limit / (norm + 1e-6)).clamp(max=1.0)
        close = (left - right).abs() <= want.norm_tolerance * right + FACTOR_STEP * norm + NORM_FLOOR
        violated |= (rules == Rule.CLIPPED) & close.logical_not()
    return violated.any()


def most(table: torch.Tensor) -> torch.Tensor:
    """[1, width]: the majority of each column, as `agree.majority`; in a tie, the value of the lowest rank."""
    votes = (table.unsqueeze(1) == table).sum(1)
    return table.gather(0, votes.argmax(0, keepdim=True))
