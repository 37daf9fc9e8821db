"""Which ranks hold the same tensors: all of them, or, on a mesh with a replicate dimension, those of one shard.

Ranks of different shards hold different bits and are right. So what is gathered from all ranks is aligned before it is
judged: 0 for a rank that holds what most ranks of its shard hold, something else for one that does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from andon_contracts.agree import majority, minority
from andon_contracts.laws.law import Observations
from andon_contracts.watch.model_probe import ModelProbe, is_sharded
from andon_contracts.watch.values import text_digest

Replicate = Any
"""A process group, or a device mesh of one dimension, of the ranks that hold what this rank holds."""
_COMPARED = ("weights", "gradient", "optimizer")
_WRAP = 1 << 64


@dataclass(frozen=True)
class Replicas:
    """The part of the model that each rank holds, by rank: ranks with the same number are replicas of each other."""

    parts: tuple[int, ...]

    @property
    def whole(self) -> bool:
        """Whether every rank holds the same part, all of it."""
        return len(set(self.parts)) <= 1

    @property
    def copies(self) -> int:
        """How many ranks hold each part, at least."""
        return min(map(self.parts.count, self.parts))

    @property
    def cut(self) -> bool:
        """Whether there are several parts, each with replicas that can be compared."""
        return not self.whole and self.copies > 1

    def align(self, observations: Observations) -> Observations:
        """`observations` with digests that are equal on all ranks where those of each part are."""
        if not self.cut:
            return observations
        named = [name for name in _COMPARED if name in observations[0].values]
        columns = {name: self.aligned([o.values[name] for o in observations]) for name in named}
        return tuple(
            replace(o, values={**o.values, **{name: columns[name][rank] for name in named}})
            for rank, o in enumerate(observations)
        )

    def align_tensors(self, digests: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
        """The same for digests by tensor, then by rank."""
        return {name: self.aligned(by_rank) for name, by_rank in digests.items()}

    def aligned(self, values: Sequence[int]) -> tuple[int, ...]:
        """0 for each rank that holds the value of most ranks of its part; where a part has no most, for none of it.

        The `values` themselves where there are no parts to align.
        """
        if not self.cut:
            return tuple(values)
        found = [0] * len(values)
        for part in set(self.parts):
            ranks = [rank for rank, other in enumerate(self.parts) if other == part]
            for rank, away in zip(ranks, _away([values[rank] % _WRAP for rank in ranks]), strict=True):
                found[rank] = away
        return tuple(found)


def _away(held: Sequence[int]) -> list[int]:
    """How far each of the replicas of one part is from what most of them hold; one number for all, without a most."""
    if len(set(held)) == 1:
        return [0] * len(held)
    if not minority(held):
        return [text_digest(held) or 1] * len(held)
    return [(value - majority(held)) % _WRAP for value in held]


def part_of(subject: ModelProbe, given: Replicate | None, rank: int) -> tuple[int, int]:
    """The number of the part that this rank holds, and how many ranks hold it.

    given: what the user said; else what the shards' own mesh says; a shard on a mesh without replicas is its rank's.
    Raises `ValueError` for a mesh of several dimensions.
    """
    if given is not None:
        return _part_in(given)
    if not subject.sharded:
        return 0, 0
    found = {_part_on_mesh(parameter) for parameter in subject.parameters.values() if is_sharded(parameter)}
    part = found.pop()
    return (rank, 1) if found or part[1] == 1 else part


def _part_in(given: Replicate) -> tuple[int, int]:
    if getattr(given, "ndim", 1) != 1:
        msg = f"replicate= is a group or a mesh of one dimension, not of {given.ndim}: pass mesh['its name']"
        raise ValueError(msg)
    group = given.get_group() if hasattr(given, "get_group") else given
    if not isinstance(group, dist.ProcessGroup):
        msg = f"replicate= is a process group or a device mesh, not {type(given).__name__}"
        raise ValueError(msg)
    ranks = dist.get_process_group_ranks(group)
    return min(ranks), len(ranks)


def _part_on_mesh(parameter: torch.Tensor) -> tuple[int, int]:
    mesh, part, copies = parameter.device_mesh, 0, 1  # type: ignore[attr-defined]
    for dimension, place in enumerate(mesh.get_coordinate()):
        if parameter.placements[dimension].is_replicate():  # type: ignore[attr-defined]
            copies *= mesh.size(dimension)
        else:
            part = part * mesh.size(dimension) + place
    return part, copies


def replicas_of(parts: Sequence[int], copies: Sequence[int]) -> Replicas:
    """The replicas, from what every rank says of its own part. Raises `ValueError` where that is no partition."""
    for rank, (part, count) in enumerate(zip(parts, copies, strict=True)):
        if count and list(parts).count(part) != count:
            msg = f"replicate= must cut the ranks into groups: rank {rank} names {count} replicas, {list(parts)} say so"
            raise ValueError(msg)
    return Replicas(tuple(parts))
