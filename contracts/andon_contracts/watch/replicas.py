"""Which ranks hold the same tensors: all of them, or, on a mesh with a replicate dimension, those of one shard.

Ranks of different shards rightly hold different bits. So gathered digests are aligned before they are judged: a rank
that agrees with most ranks of its shard gets 0, any other rank another number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from andon_contracts.agree import majority, minority
from andon_contracts.laws.law import Observations
from andon_contracts.watch.model_probe import ModelProbe, is_sharded
from andon_contracts.watch.values import text_digest

Replicate = Any
"""A process group, or a device mesh of one dimension, of the ranks that hold what this rank holds."""
_WRAP = 1 << 64


@dataclass(frozen=True)
class Replicas:
    """The part of the model that each rank holds, by rank: ranks with the same number are replicas of each other."""

    parts: tuple[int, ...]

    @property
    def copies(self) -> int:
        """How many ranks hold each part, at least."""
        return min(map(self.parts.count, self.parts))

    @property
    def cut(self) -> bool:
        """True if there are several parts, each with replicas that can be compared."""
        return len(set(self.parts)) > 1 and self.copies > 1

    def align(self, observations: Observations) -> Observations:
        """`observations` with digests that are equal on all ranks if those of each part are."""
        if not self.cut:
            return observations
        named = [name for name in ("weights", "gradient", "optimizer") if name in observations[0].values]
        columns = {name: self.aligned([o.values[name] for o in observations]) for name in named}
        return tuple(
            replace(o, values={**o.values, **{name: columns[name][rank] for name in named}})
            for rank, o in enumerate(observations)
        )

    def align_tensors(self, digests: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
        """The same for digests by tensor, then by rank."""
        return {name: self.aligned(by_rank) for name, by_rank in digests.items()}

    def aligned(self, values: Sequence[int]) -> tuple[int, ...]:
        """By rank, how far its value is from that of most ranks of its part; one number for all without a majority.

        The `values` themselves if there are no parts to align.
        """
        if not self.cut:
            return tuple(values)
        found = [0] * len(values)
        for part in set(self.parts):
            ranks = [rank for rank, other in enumerate(self.parts) if other == part]
            held = [values[rank] % _WRAP for rank in ranks]
            parted = len(set(held)) > 1 and not minority(held)
            for rank, value in zip(ranks, held, strict=True):
                found[rank] = (text_digest(held) or 1) if parted else (value - majority(held)) % _WRAP
        return tuple(found)


def part_of(subject: ModelProbe, given: Replicate | None, rank: int) -> tuple[int, int]:
    """The number of the part that this rank holds, and how many ranks hold it; (0, 0) for the whole model.

    given: the `replicate` of the user; None: the shards' own mesh tells it. Without replicas every rank has a part of
    its own. Raises `ValueError` for a mesh of several dimensions.
    """
    if given is not None:
        if getattr(given, "ndim", 1) != 1:
            msg = f"replicate= is a group or a mesh of one dimension, not of {given.ndim}: pass mesh['its name']"
            raise ValueError(msg)
        group = given.get_group() if hasattr(given, "get_group") else given
        if not isinstance(group, dist.ProcessGroup):
            msg = f"replicate= is a process group or a device mesh, not {type(given).__name__}"
            raise ValueError(msg)
        ranks = dist.get_process_group_ranks(group)
        return min(ranks), len(ranks)
    found = set()
    for shard in filter(is_sharded, subject.parameters.values()):
        mesh, part, copies = shard.device_mesh, 0, 1  # type: ignore[attr-defined]
        for dimension, place in enumerate(mesh.get_coordinate()):
            if shard.placements[dimension].is_replicate():  # type: ignore[attr-defined]
                copies *= mesh.size(dimension)
            else:
                part = part * mesh.size(dimension) + place
        found.add((part, copies))
    if not found:
        return 0, 0
    first = found.pop()
    return first if not found and first[1] > 1 else (rank, 1)


def replicas_of(parts: Sequence[int], copies: Sequence[int]) -> Replicas:
    """The replicas, from the part that every rank names. Raises `ValueError` if these do not partition the ranks."""
    for rank, (part, count) in enumerate(zip(parts, copies, strict=True)):
        if count and list(parts).count(part) != count:
            msg = f"replicate= must cut the ranks into groups: rank {rank} names {count} replicas, {list(parts)} say so"
            raise ValueError(msg)
    return Replicas(tuple(parts))
