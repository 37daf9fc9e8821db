"""What the ranks of a watch tell each other: numbered observations, and on a mismatch closer and closer looks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from andon_contracts.act import Scene, violation
from andon_contracts.agree import GroupGather, Observation, gather_observations, gather_short
from andon_contracts.begun import Begun
from andon_contracts.digest import mix64
from andon_contracts.judge import Observations, in_lockstep, minority
from andon_contracts.loop_clauses import judge_lockstep
from andon_contracts.observe import digests_by_name
from andon_contracts.violation import Violation
from andon_contracts.watch.reading import plain, text_digest

WIDTH = 64
"""Integers in a message: its header and its values, with room to spare."""
_BLOCKS = 1024
_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Element:
    """The first element in which ranks differ: its index in the tensor, and its bits on each rank."""

    index: tuple[int, ...]
    bits: tuple[int, ...]
    width: int

    def __str__(self) -> str:
        count = 2 * self.width
        shown = [f"{bits % (1 << 8 * self.width):#0{count + 2}x}" for bits in self.bits]
        odd = minority(self.bits)
        named = [f"{shown[rank]} on rank {rank}" for rank in odd or range(len(shown))]
        others = [f"{next(bits for rank, bits in enumerate(shown) if rank not in odd)} on the others"] if odd else []
        where = f"first at {list(self.index)}: " if self.index else ""
        return where + ", ".join(named + others)


class Exchange:
    """Gathers observations over a group of our own, numbering every message. All ranks must call alike."""

    def __init__(self, gather: GroupGather) -> None:
        self._gather = gather
        self._sequence = 0
        self._begun: Begun | None = None
        self.rank = gather.rank
        self.world_size = gather.world_size
        self.alike = True
        """Whether every rank should hold the same tensors; where not, no element of them is compared."""

    def attend(self, heed: Callable[[], None], lost: Callable[[BaseException], None], begun: Begun) -> None:
        """Call `heed` now and then while a gather waits, and `lost` with the error of one that failed.

        begun: counts the gathers.
        """
        self._gather.heed, self._gather.lost, self._begun = heed, lost, begun

    def connect(self) -> None:
        """Take the shorter way to ranks of this machine, where that leads to all of them. Collective."""
        self._gather.connect()

    def close(self) -> None:
        """Nothing will be exchanged any more."""
        self._gather.close()

    def __call__(
        self, step: int, point: str, values: Mapping[str, int], payload: Tensor | None = None, *, judged: bool = False
    ) -> tuple[Observation, ...]:
        """Every rank's observation of `values`, by rank; a payload must have one length on all ranks.

        judged: who calls judges itself whether the ranks are at the same point. Otherwise raises `Violation` of
        `halt-together` where they are not, whatever a watch does on a finding: there is no answer to go on with.
        """
        self._sequence += 1
        mine = Observation(self.rank, step, self._sequence, point, values, payload)
        if self._begun is None:
            seen = self._gathered(mine)
        else:
            self._begun.gathering()
            try:
                seen = self._gathered(mine)
            finally:
                self._begun.gathered()
        if not judged and not in_lockstep(seen):
            self._out_of_step(seen)
        return seen

    def _gathered(self, mine: Observation) -> tuple[Observation, ...]:
        if mine.payload is None and self._gather.takes(len(mine.values)):
            return gather_short(mine, self._gather)
        return gather_observations([mine], self._gather)

    def _out_of_step(self, seen: Observations) -> NoReturn:
        try:
            judge_lockstep(seen, {}, ())
        except Violation as found:
            raise violation(found.clause, found.finding, Scene(self.world_size)) from None
        raise AssertionError("ranks that are not in step are in step")

    def look(self, step: int, name: str, tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
        """The digest of each of `tensors` on each rank, by tensor; nothing where the ranks have others."""
        return self.spread(step, f"tensors of {name}", digests_by_name({n: plain(t) for n, t in tensors.items()}))

    def spread(self, step: int, point: str, values: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        """Each of any number of `values` on each rank, by name; nothing where the ranks do not have the same names."""
        if not self._one(step, len(values), text_digest(list(values))):
            return {}
        seen = self(step, point, values)
        return {name: tuple(o.values[name] for o in seen) for name in values}

    def _one(self, step: int, *shown: int) -> bool:
        seen = self(step, "sizes", {str(index): value for index, value in enumerate(shown)})
        return all(o.values == seen[0].values for o in seen)

    def first_difference(self, step: int, tensor: Tensor) -> Element | None:
        """The first element in which the ranks' `tensor`s differ; None where they do not. A few gathers."""
        words = _bits(tensor)
        if not self.alike or not self._one(step, words.numel()):
            return None
        first, size = 0, words.numel()
        while size > _BLOCKS:
            per_block = -(-size // _BLOCKS)
            rows = self._rows(step, _block_sums(words[first : first + size], per_block))
            block = _first_odd(rows)
            if block is None:
                return None
            first, size = first + block * per_block, min(per_block, size - block * per_block)
        rows = self._rows(step, words[first : first + size])
        odd = _first_odd(rows)
        if odd is None:
            return None
        index = tuple(int(i) for i in torch.unravel_index(torch.tensor(first + odd), tensor.shape))
        return Element(index, tuple(int(row[odd]) for row in rows), tensor.element_size())

    def _rows(self, step: int, words: Tensor) -> list[Tensor]:
        seen = self(step, "elements", {"count": words.numel()}, words.cpu())
        return [o.payload for o in seen if o.payload is not None]


def _bits(tensor: Tensor) -> Tensor:
    flat = plain(tensor).contiguous().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    return flat.view(_INTEGER[flat.element_size()]).to(torch.int64)


def _block_sums(words: Tensor, per_block: int) -> Tensor:
    places = torch.arange(words.numel(), dtype=torch.int64, device=words.device)
    mixed = mix64(words * 0x9E3779B97F4A7C1 + mix64(places))
    return torch.nn.functional.pad(mixed, (0, -words.numel() % per_block)).view(-1, per_block).sum(1)


def _first_odd(rows: Sequence[Tensor]) -> int | None:
    stacked = torch.stack(list(rows))
    odd = (stacked != stacked[0]).any(0).nonzero()
    return int(odd[0]) if odd.numel() else None
