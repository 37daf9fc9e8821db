"""The gathers of a watch: numbered observations, digests of tensors, the first differing element, and replicas."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from andon_contracts.act import Scene, with_message
from andon_contracts.agree import (
    WRAP,
    GroupGather,
    Observation,
    RankSet,
    by_rank,
    gather_observations,
    gather_short,
    majority,
    minority,
)
from andon_contracts.digest import digests_by_name, mix64
from andon_contracts.laws.law import LOCKSTEP, Judgement, Law, Observations, Seen
from andon_contracts.liveness.halt import PendingCollectives
from andon_contracts.observe import plain
from andon_contracts.violation import Finding, named_ranks
from andon_contracts.watch.model_probe import ModelProbe
from andon_contracts.watch.values import text_digest

WIDTH = 112
"""The length of a short message in integers: header, values and padding."""
_BLOCKS = 1024
_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def element_text(index: Sequence[int], bits: Sequence[int], dtype: torch.dtype) -> str:
    """Describes an element that differs: its index in the tensor, and its bits on each rank.

    For a real dtype the number follows its bits, with the fewest digits that identify it.
    """
    shown = []
    for value in bits:
        shown.append(f"{value % (1 << 8 * dtype.itemsize):#0{2 * dtype.itemsize + 2}x}")
        if dtype.is_floating_point:
            number = torch.tensor([value], device="cpu").to(_INTEGER[dtype.itemsize]).view(dtype).item()
            texts = [f"{number:.{digits}g}" for digits in range(1, 18)]
            exact = (t for t in texts if torch.tensor(float(t), dtype=dtype, device="cpu").item() == number)
            shown[-1] += f" ({next(exact, texts[-1])})"
    return (f"first at {list(index)}: " if index else "") + by_rank(shown)


def element_bits(tensor: Tensor) -> Tensor:
    """The bits of each element as int64, [..., 2] for complex elements."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.contiguous().view(_INTEGER[real.element_size()]).to(torch.int64)


class Exchange:
    """Gathers observations over a separate group and numbers every message. All ranks must make the same calls."""

    def __init__(self, gather: GroupGather, ranks: Sequence[int] = (0,)) -> None:
        self.has_all_ranks = RankSet(ranks).all_in  # the watched ranks, by their numbers in the default group
        self._gather = gather
        self._sequence = 0
        self._pending: PendingCollectives | None = None
        self.rank = gather.rank
        self.world_size = gather.world_size
        self.connect = gather.connect
        self.close = gather.close

    def set_callbacks(
        self, raise_if_halted: Callable[[], None], lost: Callable[[BaseException], None], pending: PendingCollectives
    ) -> None:
        """A gather calls `raise_if_halted` while it waits and `lost` if it fails; `pending` counts gathers."""
        self._gather.raise_if_halted, self._gather.on_error, self._pending = raise_if_halted, lost, pending

    def __call__(
        self, step: int, point: str, values: Mapping[str, int], payload: Tensor | None = None, *, judged: bool = False
    ) -> tuple[Observation, ...]:
        """Gather `values`. Returns every rank's observation, by rank. A payload must have one length on all ranks.

        judged: the caller checks that the ranks are at the same point. Otherwise this raises `Violation` of
        `halt-together` if they are not, whatever the action is: the gathered values cannot be used.
        """
        self._sequence += 1
        own = Observation(self.rank, step, self._sequence, point, values, payload)
        if self._pending is not None:
            self._pending.gathering()
        try:
            short = payload is None and self._gather.fits_sockets(len(values))
            seen = gather_short(own, self._gather) if short else gather_observations([own], self._gather)
        finally:
            if self._pending is not None:
                self._pending.gathered()
        judgement = Judgement(() if judged else (LOCKSTEP,), Seen(seen, None))
        if judgement.first is not None:
            raise with_message(judgement.violation(judgement.first), Scene(self.world_size))
        return seen

    def gather_at_close(
        self, step: int, point: str, values: Mapping[str, int], within_s: float
    ) -> tuple[Observation, ...]:
        """The last gather, at the close: waits at most `within_s` seconds, because another rank may have ended.

        Raises `TimeoutError`, and the group's own error if a rank is gone.
        """
        until = time.monotonic() + within_s

        def raise_if_halted() -> None:
            if time.monotonic() > until:
                raise TimeoutError(f"not every rank closed its watch within {within_s:g} s")

        # A rank that ends before this one has not failed, so a lost connection is not reported.
        self._gather.raise_if_halted, self._gather.on_error, self._pending = raise_if_halted, None, None
        return self(step, point, values, judged=True)

    def gather_columns(self, step: int, columns: Sequence[Sequence[int]]) -> list[list[list[int]]]:
        """Gather the `columns` of every rank, by rank. All columns of a rank must have one length. Two gathers."""
        # The lengths first: a collective takes one length of all ranks.
        counts = [o.values["count"] for o in self(step, "count", {"count": len(columns[0])})]
        table = torch.zeros(len(columns), max(counts), dtype=torch.int64, device="cpu")
        for index, column in enumerate(columns):
            table[index, : len(column)] = torch.tensor(list(column), dtype=torch.int64, device="cpu")
        tables = self._payloads(step, "rows", {}, table.flatten())
        rows = [each.view(len(columns), max(counts)).tolist() for each in tables]
        return [[row[:count] for row in of_rank] for of_rank, count in zip(rows, counts, strict=True)]

    def _payloads(self, step: int, point: str, values: Mapping[str, int], payload: Tensor) -> list[Tensor]:
        return [o.payload for o in self(step, point, values, payload) if o.payload is not None]

    def gather_digests(self, step: int, name: str, tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
        """By tensor, the digest on each rank; empty if the ranks have different names. Two gathers."""
        return self.gather_named(step, f"tensors of {name}", digests_by_name({n: plain(t) for n, t in tensors.items()}))

    def gather_named(self, step: int, point: str, values: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        """By name, the value on each rank, for any number of names; empty if these differ. Two gathers."""
        sizes = self(step, "sizes", {"0": len(values), "1": text_digest(list(values))})
        if any(o.values != sizes[0].values for o in sizes):
            return {}
        seen = self(step, point, values)
        return {name: tuple(o.values[name] for o in seen) for name in values}

    def gather_texts(self, step: int, text: str) -> tuple[str, ...]:
        """Every rank's `text`, by rank. Two gathers. Used after a difference was found."""
        columns = self.gather_columns(step, [list(text.encode("utf-8", "backslashreplace"))])
        return tuple(bytes(column).decode("utf-8") for (column,) in columns)

    def first_difference(self, step: int, tensor: Tensor | None, noun: str = "tensor") -> str:
        """The first element in which the ranks' `tensor`s differ, in words; "" if they do not. A few gathers.

        tensor: None on a rank without one. If only some ranks have a tensor, the result names those without a `noun`.
        """
        local = None if tensor is None else plain(tensor)
        words = None if local is None else element_bits(local).flatten()
        counts = [o.values["0"] for o in self(step, "sizes", {"0": -1 if words is None else words.numel()})]
        if tensor is None or local is None or words is None or len(set(counts)) > 1:
            lacking = [rank for rank, count in enumerate(counts) if count < 0]
            verb = "have" if len(lacking) > 1 else "has"
            return f"{named_ranks(lacking)} {verb} no {noun}" if 0 < len(lacking) < len(counts) else ""
        first, size = 0, words.numel()
        while True:
            per_block = max(-(-size // _BLOCKS), 1)
            part = words[first : first + size]
            sums = part
            if per_block > 1:
                mixed = mix64(part * 0x9E3779B97F4A7C1 + mix64(torch.arange(size, device=part.device)))
                sums = torch.nn.functional.pad(mixed, (0, -size % per_block)).view(-1, per_block).sum(1)
            rows = torch.stack(self._payloads(step, "elements", {"count": sums.numel()}, sums.cpu()))
            odd = (rows != rows[0]).any(0).nonzero()
            if not odd.numel():
                return ""
            block = int(odd[0])
            if per_block == 1:
                break
            first, size = first + block * per_block, min(per_block, size - block * per_block)
        shape = tensor.shape if tensor.numel() == local.numel() else local.shape
        index = torch.unravel_index(torch.tensor(first + block, device="cpu"), shape)
        return element_text([int(i) for i in index], rows[:, block].tolist(), local.dtype)


@dataclass(frozen=True)
class Replicas:
    """The part of the model that each rank holds, by rank. Ranks with the same number are replicas of each other.

    On a mesh with a replicate dimension, ranks of different shards rightly hold different bits. So their digests are
    aligned before they are judged: a rank that agrees with most ranks of its part gets 0, other ranks another number.

    whole: by `id`, the parameters that every rank holds whole beside shards, such as adapters that were added after
    `fully_shard`. They are replicas on all ranks, whatever the parts are. Their digests ("whole weights" and so on) are
    sent apart and added after the alignment, so all ranks have one number if the parts and the whole tensors agree.
    """

    parts: tuple[int, ...]
    whole: frozenset[int] = frozenset()

    @property
    def copies(self) -> int:
        """How many ranks hold each part, at least."""
        return min(map(self.parts.count, self.parts))

    @property
    def cut(self) -> bool:
        """True if there are several parts, each with replicas that can be compared."""
        return self.mixed and self.copies > 1

    @property
    def mixed(self) -> bool:
        """True if digests of all of a rank's tensors cannot be compared with every other rank's."""
        return len(set(self.parts)) > 1

    @property
    def any_held_twice(self) -> bool:
        """True if two ranks hold the same part, or the same whole tensor. Otherwise no bits can be compared."""
        return len(set(self.parts)) < len(self.parts) or bool(self.whole)

    def compares(self, law: Law[Seen[object]]) -> bool:
        """False for a law of replicated tensors if no two ranks hold one: it would hold without comparing anything."""
        return self.any_held_twice or {"weights", "gradient", "optimizer"}.isdisjoint(law.by_tensor)

    def align(self, observations: Observations) -> Observations:
        """Replace digests by their `aligned` values, which are equal on all ranks if all replicas agree."""
        if not self.mixed:
            return observations
        columns = {}
        for name in ("weights", "gradient", "optimizer"):
            if name in observations[0].values:
                of_parts = self.aligned([o.values[name] for o in observations])
                whole = (o.values[f"whole {name}"] for o in observations)
                columns[name] = [sum(pair) % WRAP for pair in zip(of_parts, whole, strict=True)]
        return tuple(
            replace(o, values={**o.values, **{name: column[rank] for name, column in columns.items()}})
            for rank, o in enumerate(observations)
        )

    def aligned(self, values: Sequence[int]) -> tuple[int, ...]:
        """Each rank's offset from the majority of its part; all ranks of a part without a majority share one number.

        If there are no parts to align, the `values` themselves. A rank alone with its part has the offset 0.
        """
        if not self.mixed:
            return tuple(values)
        offsets = [0] * len(values)
        for part in set(self.parts):
            ranks = [rank for rank, other in enumerate(self.parts) if other == part]
            own = [values[rank] % WRAP for rank in ranks]
            undecided = len(set(own)) > 1 and not minority(own)
            for rank, value in zip(ranks, own, strict=True):
                offsets[rank] = (text_digest(own) or 1) if undecided else (value - majority(own)) % WRAP
        return tuple(offsets)


def part_of(subject: ModelProbe, replicate: Any, rank: int) -> tuple[int, int]:
    """The number of the part that this rank holds, and how many ranks hold it; (0, 0) for the whole model.

    replicate: the user's argument; None: the mesh of the shards decides. Without replicas every rank has its own part.
    Raises `ValueError` for a mesh of several dimensions, and for anything but a mesh or a process group.
    """
    if replicate is not None:
        if getattr(replicate, "ndim", 1) != 1:
            what = f"this mesh is {replicate.ndim}-D: pass one dimension, as in mesh['dp']"
            raise ValueError(f"replicate= must be a process group or a 1-D device mesh, and {what}")
        group = replicate.get_group() if hasattr(replicate, "get_group") else replicate
        if not isinstance(group, dist.ProcessGroup):
            raise ValueError(f"replicate= must be a process group or a device mesh, not {type(replicate).__name__}")
        ranks = dist.get_process_group_ranks(group)
        return min(ranks), len(ranks)
    parts = {(shard.number, shard.copies) for shard in subject.shards.values()}
    if not parts:
        return 0, 0
    first = parts.pop()
    return first if not parts and first[1] > 1 else (rank, 1)


def replicas_of(parts: Sequence[int], copies: Sequence[int]) -> Replicas:
    """The replicas, from the `part_of` of every rank. Raises `ValueError` if these parts do not partition the ranks."""
    for rank, (part, count) in enumerate(zip(parts, copies, strict=True)):
        alike = list(parts).count(part)
        if count and alike != count:
            here = f"rank {rank} passed a group of {count}, but {alike} ranks passed one that begins at {part}"
            raise ValueError(f"replicate= must put every rank into exactly one group: {here}")
    return Replicas(tuple(parts))


@torch.no_grad()  # autograd would give a new local tensor each time
def writes(tensors: Iterable[Any]) -> int:
    """Torch's number of in-place writes. One through a distributed tensor or its local part is counted there only."""
    return sum(t._version + (t.to_local()._version if hasattr(t, "to_local") else 0) for t in tensors)


def written_alike(clause: str, tensors: str, since: str) -> Law[Seen[object]]:
    """The law that all ranks wrote to their shards equally often: no other rank has the same bits to compare."""
    name, likely = f"{tensors} writes", "code that only some ranks run, as the load of a checkpoint, writes to shards"

    def check(seen: Seen[object]) -> Finding | None:
        if name not in seen.differing or "layout" in seen.differing:
            return None
        counts = seen.column(name)
        what = f"since {since}, the ranks wrote to the shards of their {tensors} a different number of times"
        return Finding(f"{what} ({by_rank(list(map(str, counts)))})", seen.step, minority(counts), likely=likely)

    return Law(f"{clause}/writes", (name, "layout"), check, suspicion=True, of_shards=True)
