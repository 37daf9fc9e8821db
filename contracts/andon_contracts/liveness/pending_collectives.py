"""Detects two ranks that wait for each other, by counting what each begins that needs all ranks.

A rank that left out an update goes on to the next backward pass of DDP, or to the next reduction, and waits there for
the others, while they wait for it in a gather of the watch. Each rank counts the gathers, the backward passes that
reduce, and the reductions of its loop by group. A rank in its n-th gather can begin nothing else. Another rank that,
before its own n-th gather, has begun one backward pass or reduction more needs the first to begin it too. So neither
can ever go on, however slow they may be. Nothing here waits, reads a tensor or communicates.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from andon_contracts.fields import Count, Part

BACKWARD = "a backward pass that reduces its gradients over all ranks"
REDUCTION = "a reduction over all ranks"


@dataclass(frozen=True)
class Counts(Part):
    """What a rank has begun, as it tells the others. It is in the `number`-th reduction of `group`, if in one."""

    gathers: Count
    backwards: Count
    group: str = ""
    number: Count = 0


@dataclass(frozen=True)
class Waiting:
    """A rank in its `gather`-th gather, and what it has begun before: reductions by the name of their group."""

    gather: int
    backwards: int
    reductions: Mapping[str, int]


class PendingCollectives:
    """The counts of one rank: written by the thread that trains, read by any other. ranks: watched, in the world."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.armed = False  # whether the next backward pass reduces: a forward pass of DDP has said so
        self.waiting: Waiting | None = None  # the gather that this rank is in; the same object while it lasts
        self._ranks = frozenset(ranks)
        self._parameters: frozenset[int] = frozenset()
        self._gathers, self._backwards = 0, 0
        self._reductions: Counter[str] = Counter()
        self._inside: tuple[str, int] | None = None
        self._whole: dict[str, bool] = {}
        self._owner = threading.get_ident()

    def follow(self, model: nn.Module) -> list[DistributedDataParallel]:
        """The modules in `model` whose backward passes reduce over all ranks. Each forward pass calls `forward`."""
        modules = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
        found = [each for each in modules if self._ranks <= set(dist.get_process_group_ranks(each.process_group))]
        self._parameters = frozenset(id(p) for each in found for p in each.parameters())
        return found

    def forward(self, module: DistributedDataParallel) -> None:
        # A communication hook may do anything with the gradients, with any ranks.
        hooked = getattr(module, "_comm_hooks", ())
        if torch.is_grad_enabled() and module.require_backward_grad_sync and not hooked:
            self.armed = True

    def backward(self, parameter: nn.Parameter) -> None:
        if id(parameter) in self._parameters:
            self.armed = False
            self._backwards += 1

    def reducing(self, group: Any, *, waits: bool) -> None:
        """The loop reduces over `group` (None: all ranks). waits: until it calls `resumed`."""
        if threading.get_ident() != self._owner:
            return
        group = group or dist.group.WORLD
        name = getattr(group, "group_name", "")
        if name not in self._whole:
            self._whole[name] = self._ranks <= set(dist.get_process_group_ranks(group)) if name else False
        if self._whole[name]:
            self._reductions[name] += 1
            self._inside = (name, self._reductions[name]) if waits else None

    def resumed(self) -> None:
        if threading.get_ident() == self._owner:
            self._inside = None

    def gathering(self) -> None:
        self._gathers += 1
        # If a forward pass was not followed by its backward pass, that pass may still come.
        self.waiting = Waiting(self._gathers, self._backwards + self.armed, self._reductions)

    def gathered(self) -> None:
        self.waiting = None

    def counts(self) -> Counts:
        """For the other ranks, from any thread. Gathers are read last: the other counts are no newer than they."""
        backwards, inside = self._backwards, self._inside or ("", 0)
        return Counts(self._gathers, backwards, *inside)


def deadlocked(waiting: Waiting, counts: Mapping[int, Counts]) -> dict[int, str]:
    """The ranks that cannot go on before the one that is `waiting` leaves its gather, each with what it is in."""
    found = {}
    for rank, each in counts.items():
        if each.gathers < waiting.gather and each.backwards > waiting.backwards:
            found[rank] = BACKWARD
        elif each.gathers < waiting.gather and each.number > waiting.reductions.get(each.group, 0):
            found[rank] = REDUCTION
    return found
