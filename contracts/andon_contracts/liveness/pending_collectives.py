"""Detects two ranks that wait for each other, by counting what each begins that needs all ranks.

A rank that skips an update continues to the next backward pass of DDP, or to the next reduction, and waits there for
the others, while they wait for it in a gather of the watch. So each rank counts the gathers, the backward passes that
reduce, and the reductions of its loop by group. A rank in its n-th gather can begin nothing else. If another rank has,
before its own n-th gather, begun one more backward pass or reduction than the first, it needs the first to join that.
Neither can ever continue, however slow they are. Nothing here waits, reads a tensor or communicates.
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
    """The counts of a rank in its heartbeat. It is in the `number`-th reduction of `group`, if in any."""

    gathers: Count
    backwards: Count
    group: str = ""
    number: Count = 0


@dataclass(frozen=True)
class Waiting:
    """A rank in its `gather`-th gather, with its counts before: reductions by the name of their group."""

    gather: int
    backwards: int
    reductions: Mapping[str, int]


class PendingCollectives:
    """The counts of one rank. The thread that trains writes them, any thread reads. ranks: of the watched group."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.armed = False  # a forward pass of DDP has announced a backward pass that reduces
        self.waiting: Waiting | None = None  # the gather that this rank is in; one object as long as it lasts
        self._ranks = frozenset(ranks)
        self._parameters: frozenset[int] = frozenset()
        self._gathers, self._backwards = 0, 0
        self._reductions: Counter[str] = Counter()
        self._inside: tuple[str, int] | None = None
        self._has_all_ranks: dict[str, bool] = {}
        self._owner = threading.get_ident()

    def follow(self, model: nn.Module) -> list[DistributedDataParallel]:
        """The modules in `model` whose backward passes reduce over all ranks. Each forward pass calls `forward`."""
        modules = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
        modules = [each for each in modules if self._ranks <= set(dist.get_process_group_ranks(each.process_group))]
        self._parameters = frozenset(id(p) for each in modules for p in each.parameters())
        return modules

    def forward(self, module: DistributedDataParallel) -> None:
        # A communication hook may send the gradients to any ranks.
        hooked = getattr(module, "_comm_hooks", ())
        if torch.is_grad_enabled() and module.require_backward_grad_sync and not hooked:
            self.armed = True

    def backward(self, parameter: nn.Parameter) -> None:
        if id(parameter) in self._parameters:
            self.armed = False
            self._backwards += 1

    def reducing(self, group: Any, *, waits: bool) -> None:
        """The loop begins a reduction over `group` (None: all ranks). waits: it blocks until `resumed`."""
        if threading.get_ident() != self._owner:
            return
        group = group or dist.group.WORLD
        name = getattr(group, "group_name", "")
        if name not in self._has_all_ranks:
            self._has_all_ranks[name] = self._ranks <= set(dist.get_process_group_ranks(group)) if name else False
        if self._has_all_ranks[name]:
            self._reductions[name] += 1
            self._inside = (name, self._reductions[name]) if waits else None

    def resumed(self) -> None:
        if threading.get_ident() == self._owner:
            self._inside = None

    def gathering(self) -> None:
        self._gathers += 1
        # After a forward pass, the backward pass may still come.
        self.waiting = Waiting(self._gathers, self._backwards + self.armed, self._reductions)

    def gathered(self) -> None:
        self.waiting = None

    def counts(self) -> Counts:
        """For the other ranks, from any thread. Reads the gathers last, so that no other count is newer."""
        backwards, inside = self._backwards, self._inside or ("", 0)
        return Counts(self._gathers, backwards, *inside)


def deadlocked(waiting: Waiting, counts: Mapping[int, Counts]) -> dict[int, str]:
    """The ranks that need the rank of `waiting` to join their call, with the name of that call."""
    blocked = {}
    for rank, each in counts.items():
        if each.gathers < waiting.gather and each.backwards > waiting.backwards:
            blocked[rank] = BACKWARD
        elif each.gathers < waiting.gather and each.number > waiting.reductions.get(each.group, 0):
            blocked[rank] = REDUCTION
    return blocked
