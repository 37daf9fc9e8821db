"""What the ranks of a watch tell each other: numbered observations, and on a mismatch closer and closer looks."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from andon_contracts.act import Scene, violation
from andon_contracts.agree import GroupGather, Observation, gather_observations, gather_short, minority
from andon_contracts.digest import digests_by_name, mix64
from andon_contracts.laws.law import LOCKSTEP, Judgement, Seen
from andon_contracts.liveness.pending_collectives import PendingCollectives
from andon_contracts.observe import plain
from andon_contracts.watch.values import text_digest

WIDTH = 96
"""Integers in a message: its header and its values, with room to spare."""
_BLOCKS = 1024
INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integer dtype of each size in bytes."""


@dataclass(frozen=True)
class Element:
    """The first element in which ranks differ: its index in the tensor, and its bits on each rank.

    dtype: what the bits say; of floating dtypes the number is shown beside them.
    """

    index: tuple[int, ...]
    bits: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        where = f"first at {list(self.index)}: " if self.index else ""
        return where + by_rank([self._shown(bits) for bits in self.bits])

    def _shown(self, bits: int) -> str:
        width = self.dtype.itemsize
        shown = f"{bits % (1 << 8 * width):#0{2 * width + 2}x}"
        return f"{shown} ({_decimal(bits, self.dtype)})" if self.dtype.is_floating_point else shown


def by_rank(shown: Sequence[str]) -> str:
    """What each rank has, in words: `2 on rank 1, 3 on the others`, or rank by rank where no majority agrees."""
    odd = minority(shown)
    named = [f"{shown[rank]} on rank {rank}" for rank in odd or range(len(shown))]
    others = [f"{next(one for rank, one in enumerate(shown) if rank not in odd)} on the others"] if odd else []
    return ", ".join(named + others)


def has_no(noun: str, ranks: Sequence[int]) -> str:
    """That these ranks lack what the others have, in words."""
    several = len(ranks) > 1
    return f"rank{'s' * several} {', '.join(map(str, ranks))} {'have' if several else 'has'} no {noun}"


def _decimal(bits: int, dtype: torch.dtype) -> str:
    """The number with the fewest digits that are this number and no other of its dtype."""
    number = torch.tensor([bits], device="cpu").to(INTEGER[dtype.itemsize]).view(dtype).item()
    for digits in range(1, 17):
        short = f"{number:.{digits}g}"
        if torch.tensor(float(short), dtype=dtype, device="cpu").item() == number:
            return short
    return f"{number:.17g}"


class Exchange:
    """Gathers observations over a group of our own, numbering every message. All ranks must call alike."""

    def __init__(self, gather: GroupGather) -> None:
        self._gather = gather
        self._sequence = 0
        self._begun: PendingCollectives | None = None
        self.rank = gather.rank
        self.world_size = gather.world_size
        self.alike = True
        """Whether every rank should hold the same tensors; where not, no element of them is compared."""

    def attend(
        self, heed: Callable[[], None], lost: Callable[[BaseException], None], begun: PendingCollectives
    ) -> None:
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
        judgement = Judgement(() if judged else (LOCKSTEP,), Seen(seen, None))
        if judgement.first is not None:
            found = judgement.violation(judgement.first)
            raise violation(found.clause, found.finding, Scene(self.world_size))
        return seen

    def _gathered(self, mine: Observation) -> tuple[Observation, ...]:
        if mine.payload is None and self._gather.takes(len(mine.values)):
            return gather_short(mine, self._gather)
        return gather_observations([mine], self._gather)

    def closing(self, step: int, point: str, values: Mapping[str, int], within_s: float) -> tuple[Observation, ...]:
        """What every rank observed, at the close, where another may have ended: waits `within_s` seconds at most.

        Raises `TimeoutError`, and what the group raises where a rank is gone. Nothing can be exchanged after that.
        """
        until = time.monotonic() + within_s

        def heed() -> None:
            if time.monotonic() > until:
                raise TimeoutError(f"not every rank closed its watch within {within_s:g} s")

        # Nobody has failed who ends before another.
        self._gather.heed, self._gather.lost, self._begun = heed, None, None
        return self(step, point, values, judged=True)

    def columns(self, step: int, columns: Sequence[Sequence[int]]) -> list[list[list[int]]]:
        """By rank, some columns of integers of one length on each rank. Two gathers."""
        # The lengths first: a collective takes one length of all ranks.
        counts = [o.values["count"] for o in self(step, "count", {"count": len(columns[0])})]
        most = max(counts)
        table = torch.zeros(len(columns), most, dtype=torch.int64, device="cpu")
        for index, column in enumerate(columns):
            table[index, : len(column)] = torch.tensor(list(column), dtype=torch.int64, device="cpu")
        seen = self(step, "rows", {}, table.flatten())
        return [
            [list(row[:count]) for row in o.payload.view(len(columns), most).tolist()]
            for o, count in zip(seen, counts, strict=True)
            if o.payload is not None
        ]

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

    def texts(self, step: int, text: str) -> tuple[str, ...]:
        """Every rank's `text`, by rank. Two gathers, for use where something differs already."""
        raw = text.encode("utf-8", "backslashreplace")
        sizes = [o.values["bytes"] for o in self(step, "length", {"bytes": len(raw)})]
        padded = bytearray(raw.ljust(-(-max(*sizes, 1) // 8) * 8, b"\0"))
        seen = self(step, "text", {"bytes": len(raw)}, torch.frombuffer(padded, dtype=torch.int64))
        held = [b"".join(struct.pack("=q", each) for each in o.payload.tolist()) for o in seen if o.payload is not None]
        return tuple(one[:size].decode("utf-8") for one, size in zip(held, sizes, strict=True))

    def first_difference(self, step: int, tensor: Tensor | None, noun: str = "tensor") -> Element | str | None:
        """The first element in which the ranks' `tensor`s differ; None if they do not. A few gathers.

        tensor: None on a rank that has none. If only some ranks have one, the result says which have no `noun`.
        """
        if not self.alike:
            return None
        held = None if tensor is None else plain(tensor)
        words = None if held is None else _bits(held)
        counts = [o.values["0"] for o in self(step, "sizes", {"0": -1 if words is None else words.numel()})]
        if tensor is None or held is None or words is None or len(set(counts)) > 1:
            lacking = [rank for rank, count in enumerate(counts) if count < 0]
            return has_no(noun, lacking) if 0 < len(lacking) < len(counts) else None
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
        shape = tensor.shape if tensor.numel() == held.numel() else held.shape
        index = tuple(int(i) for i in torch.unravel_index(torch.tensor(first + odd, device="cpu"), shape))
        return Element(index, tuple(int(row[odd]) for row in rows), held.dtype)

    def _rows(self, step: int, words: Tensor) -> list[Tensor]:
        seen = self(step, "elements", {"count": words.numel()}, words.cpu())
        return [o.payload for o in seen if o.payload is not None]


def _bits(tensor: Tensor) -> Tensor:
    flat = tensor.contiguous().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    return flat.view(INTEGER[flat.element_size()]).to(torch.int64)


def _block_sums(words: Tensor, per_block: int) -> Tensor:
    places = torch.arange(words.numel(), dtype=torch.int64, device=words.device)
    mixed = mix64(words * 0x9E3779B97F4A7C1 + mix64(places))
    return torch.nn.functional.pad(mixed, (0, -words.numel() % per_block)).view(-1, per_block).sum(1)


def _first_odd(rows: Sequence[Tensor]) -> int | None:
    stacked = torch.stack(list(rows))
    odd = (stacked != stacked[0]).any(0).nonzero()
    return int(odd[0]) if odd.numel() else None
