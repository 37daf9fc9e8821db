"""What the ranks of a watch gather: numbered observations, and closer and closer looks at tensors that differ."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from andon_contracts.act import Scene, violation
from andon_contracts.agree import GroupGather, Observation, gather_observations, gather_short, minority
from andon_contracts.digest import digests_by_name, mix64
from andon_contracts.laws.law import LOCKSTEP, Judgement, Seen
from andon_contracts.liveness.diagnosis import rank_names
from andon_contracts.liveness.pending_collectives import PendingCollectives
from andon_contracts.observe import plain
from andon_contracts.watch.values import text_digest

WIDTH = 96
"""Integers in a message: its header and its values, with room to spare."""
_BLOCKS = 1024
INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integer dtype of each size in bytes."""


def by_rank(shown: Sequence[str]) -> str:
    """The value of each rank in words: `2 on rank 1, 3 on the others`, or rank by rank if no majority agrees."""
    odd = minority(shown)
    words = [f"{shown[rank]} on rank {rank}" for rank in odd or range(len(shown))]
    others = [f"{next(one for rank, one in enumerate(shown) if rank not in odd)} on the others"] if odd else []
    return ", ".join(words + others)


def element_text(index: Sequence[int], bits: Sequence[int], dtype: torch.dtype) -> str:
    """An element in which ranks differ: its index in the tensor, its bits on each rank, and their number if it is real.

    The number has the fewest digits that are this number and no other of its dtype.
    """
    shown = []
    for each in bits:
        shown.append(f"{each % (1 << 8 * dtype.itemsize):#0{2 * dtype.itemsize + 2}x}")
        if dtype.is_floating_point:
            number = torch.tensor([each], device="cpu").to(INTEGER[dtype.itemsize]).view(dtype).item()
            texts = [f"{number:.{digits}g}" for digits in range(1, 18)]
            exact = (t for t in texts if torch.tensor(float(t), dtype=dtype, device="cpu").item() == number)
            shown[-1] += f" ({next(exact, texts[-1])})"
    return (f"first at {list(index)}: " if index else "") + by_rank(shown)


class Exchange:
    """Gathers observations over a separate group and numbers every message. All ranks must make the same calls."""

    def __init__(self, gather: GroupGather) -> None:
        self._gather = gather
        self._sequence = 0
        self._pending: PendingCollectives | None = None
        self.rank = gather.rank
        self.world_size = gather.world_size
        self.alike = True
        """Whether every rank should hold the same tensors. If not, no element of them is compared."""

    def attend(
        self, raise_if_halted: Callable[[], None], lost: Callable[[BaseException], None], pending: PendingCollectives
    ) -> None:
        """Call `raise_if_halted` now and then while a gather waits, and `lost` with the error of a gather that failed.

        pending: counts the gathers.
        """
        self._gather.raise_if_halted, self._gather.on_error, self._pending = raise_if_halted, lost, pending

    def connect(self) -> None:
        """Connect to the other ranks directly if all are on this machine. Collective."""
        self._gather.connect()

    def close(self) -> None:
        self._gather.close()

    def __call__(
        self, step: int, point: str, values: Mapping[str, int], payload: Tensor | None = None, *, judged: bool = False
    ) -> tuple[Observation, ...]:
        """Every rank's observation of `values`, by rank. A payload must have one length on all ranks.

        judged: the caller checks that the ranks are at the same point. Otherwise raises `Violation` of `halt-together`
        if they are not, even if the action is to warn, because there is no answer to continue with.
        """
        self._sequence += 1
        mine = Observation(self.rank, step, self._sequence, point, values, payload)
        pending = self._pending
        if pending is not None:
            pending.gathering()
        try:
            if payload is None and self._gather.fits_sockets(len(values)):
                seen = gather_short(mine, self._gather)
            else:
                seen = gather_observations([mine], self._gather)
        finally:
            if pending is not None:
                pending.gathered()
        judgement = Judgement(() if judged else (LOCKSTEP,), Seen(seen, None))
        if judgement.first is not None:
            found = judgement.violation(judgement.first)
            raise violation(found.clause, found.finding, Scene(self.world_size))
        return seen

    def closing(self, step: int, point: str, values: Mapping[str, int], within_s: float) -> tuple[Observation, ...]:
        """The last gather, at the close: waits at most `within_s` seconds, because another rank may have ended.

        Raises `TimeoutError`, and what the group raises if a rank is gone.
        """
        until = time.monotonic() + within_s

        def raise_if_halted() -> None:
            if time.monotonic() > until:
                raise TimeoutError(f"not every rank closed its watch within {within_s:g} s")

        # A rank that ends before another one has not failed.
        self._gather.raise_if_halted, self._gather.on_error, self._pending = raise_if_halted, None, None
        return self(step, point, values, judged=True)

    def columns(self, step: int, columns: Sequence[Sequence[int]]) -> list[list[list[int]]]:
        """By rank, some columns of integers of one length on each rank. Two gathers."""
        # The lengths first: a collective takes one length of all ranks.
        counts = [o.values["count"] for o in self(step, "count", {"count": len(columns[0])})]
        table = torch.zeros(len(columns), max(counts), dtype=torch.int64, device="cpu")
        for index, column in enumerate(columns):
            table[index, : len(column)] = torch.tensor(list(column), dtype=torch.int64, device="cpu")
        tables = self._payloads(step, "rows", {}, table.flatten())
        return [
            [row[:count] for row in each.view(len(columns), max(counts)).tolist()]
            for each, count in zip(tables, counts, strict=True)
        ]

    def _payloads(self, step: int, point: str, values: Mapping[str, int], payload: Tensor) -> list[Tensor]:
        return [o.payload for o in self(step, point, values, payload) if o.payload is not None]

    def look(self, step: int, name: str, tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
        """The digest of each of `tensors` on each rank, by tensor; empty if the ranks do not have the same names."""
        return self.spread(step, f"tensors of {name}", digests_by_name({n: plain(t) for n, t in tensors.items()}))

    def spread(self, step: int, point: str, values: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        """Each of any number of `values` on each rank, by name; empty if the ranks do not have the same names."""
        sizes = self(step, "sizes", {"0": len(values), "1": text_digest(list(values))})
        if any(o.values != sizes[0].values for o in sizes):
            return {}
        seen = self(step, point, values)
        return {name: tuple(o.values[name] for o in seen) for name in values}

    def texts(self, step: int, text: str) -> tuple[str, ...]:
        """Every rank's `text`, by rank. Two gathers, for use after a difference was found."""
        columns = self.columns(step, [list(text.encode("utf-8", "backslashreplace"))])
        return tuple(bytes(column).decode("utf-8") for (column,) in columns)

    def first_difference(self, step: int, tensor: Tensor | None, noun: str = "tensor") -> str:
        """The first element in which the ranks' `tensor`s differ, in words; "" if they do not. A few gathers.

        tensor: None on a rank that has none. If only some ranks have one, the result says which have no `noun`.
        """
        if not self.alike:
            return ""
        held = None if tensor is None else plain(tensor)
        words = None if held is None else element_bits(held).flatten()
        counts = [o.values["0"] for o in self(step, "sizes", {"0": -1 if words is None else words.numel()})]
        if tensor is None or held is None or words is None or len(set(counts)) > 1:
            lacking = [rank for rank, count in enumerate(counts) if count < 0]
            verb = "have" if len(lacking) > 1 else "has"
            return f"{rank_names(lacking)} {verb} no {noun}" if 0 < len(lacking) < len(counts) else ""
        first, size = 0, words.numel()
        while True:
            per_block = max(-(-size // _BLOCKS), 1)
            part = words[first : first + size]
            sums = part if per_block == 1 else _block_sums(part, per_block)
            rows = torch.stack(self._payloads(step, "elements", {"count": sums.numel()}, sums.cpu()))
            odd = (rows != rows[0]).any(0).nonzero()
            if not odd.numel():
                return ""
            block = int(odd[0])
            if per_block == 1:
                break
            first, size = first + block * per_block, min(per_block, size - block * per_block)
        shape = tensor.shape if tensor.numel() == held.numel() else held.shape
        index = torch.unravel_index(torch.tensor(first + block, device="cpu"), shape)
        return element_text([int(i) for i in index], rows[:, block].tolist(), held.dtype)


def element_bits(tensor: Tensor) -> Tensor:
    """The bits of each element as int64, [..., 2] for complex elements."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.contiguous().view(INTEGER[real.element_size()]).to(torch.int64)


def _block_sums(words: Tensor, per_block: int) -> Tensor:
    places = torch.arange(words.numel(), dtype=torch.int64, device=words.device)
    mixed = mix64(words * 0x9E3779B97F4A7C1 + mix64(places))
    return torch.nn.functional.pad(mixed, (0, -words.numel() % per_block)).view(-1, per_block).sum(1)
