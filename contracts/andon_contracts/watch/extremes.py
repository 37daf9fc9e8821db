"""The smallest and the largest element of gradients: found where they are, read all together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from andon_contracts.watch.reading import ORDINARY, plain


def extremes(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest and the largest element, 0-dim, without a wait for the device; zeros for an empty tensor.

    Both are finite where all elements are, whatever their squares are; both are NaN where one is, zero where all are.
    """
    if type(tensor) not in ORDINARY or tensor.layout != torch.strided:
        tensor = plain(tensor)
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if not tensor.numel():
        return tensor.new_zeros(()), tensor.new_zeros(())
    low, high = torch.aminmax(tensor)
    return low, high


def values_of(scalars: Sequence[Tensor]) -> list[float]:
    """The values of 0-dim tensors, with one wait for each device."""
    if not scalars:
        return []
    if len({scalar.device for scalar in scalars}) > 1:
        scalars = [scalar.cpu() for scalar in scalars]
    found: list[float] = torch.stack(list(scalars)).tolist()
    return found


class Extremes:
    """The `extremes` of the gradients of some parameters, of any number of backward passes.

    They are written into places that are kept, so that a look costs one operation and reading costs one for all.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.any = False
        """Whether there is one."""
        self._kinds = [(parameter.dtype, parameter.device) for parameter in parameters]
        self._plain = [_is_plain(parameter) for parameter in parameters]
        self._passes = [0] * len(parameters)
        self._rooms: list[_Room] = []
        self._others: list[tuple[int, Tensor, Tensor]] = []

    def add(self, index: int, gradient: Tensor) -> None:
        """A backward pass gave `gradient` to parameter `index`."""
        self.any = True
        if self._plain[index]:
            number = self._passes[index]
            if number == len(self._rooms):
                self._rooms.append(_Room(self._kinds))
            try:
                torch.aminmax(gradient, out=self._rooms[number].places[index])
            except RuntimeError:
                # Of another dtype, layout or device than its parameter was, empty, or itself to be differentiated.
                self._plain[index] = False
            else:
                self._passes[index] = number + 1
                return
        self._others.append((index, *extremes(gradient)))

    def has(self, index: int) -> bool:
        """Whether there is one of parameter `index`."""
        return self._passes[index] > 0 or any(index == one for one, _, _ in self._others)

    def read(self) -> list[tuple[int, float, float]]:
        """(parameter, smallest, largest) of each; one wait for each table of places that was used."""
        found: list[tuple[int, float, float]] = []
        for number in range(max(self._passes, default=0)):
            places = self._rooms[number].read()
            if min(self._passes) <= number:
                places = [place for place in places if self._passes[place[0]] > number]
            found += places
        if not self._others:
            return found
        lows, highs = values_of([low for _, low, _ in self._others]), values_of([high for _, _, high in self._others])
        return found + [(other[0], low, high) for other, low, high in zip(self._others, lows, highs, strict=True)]

    def clear(self) -> None:
        """Forget all of them."""
        self.any = False
        self._passes = [0] * len(self._passes)
        self._others.clear()


class _Room:
    """Places for the extremes of one pass: a table [2, parameters] for each dtype and device."""

    def __init__(self, kinds: Sequence[tuple[torch.dtype, torch.device]]) -> None:
        self.places: dict[int, tuple[Tensor, Tensor]] = {}
        self._tables: list[tuple[list[int], Tensor]] = []
        for dtype, device in dict.fromkeys(kinds):
            owners = [index for index, kind in enumerate(kinds) if kind == (dtype, device)]
            table = torch.zeros(2, len(owners), dtype=dtype, device=device)
            self.places |= zip(owners, zip(table[0].unbind(), table[1].unbind(), strict=True), strict=True)
            self._tables.append((owners, table))

    def read(self) -> list[tuple[int, float, float]]:
        """(parameter, smallest, largest) of all places, written or not."""
        return [place for owners, table in self._tables for place in zip(owners, *table.tolist(), strict=True)]


def _is_plain(parameter: Tensor) -> bool:
    ordinary = type(parameter) in ORDINARY and parameter.layout == torch.strided
    return ordinary and parameter.is_floating_point() and parameter.numel() > 0
