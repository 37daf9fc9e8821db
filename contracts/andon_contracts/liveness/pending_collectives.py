"""What each rank has begun that cannot end without all of them: whether two ranks wait for each other is counted.

A rank that left out an update goes on to the next backward pass of DDP, or to the next reduction, and waits there for
the others, who wait for it in a gather of the watch. Each counts what it begins: gathers, backward passes that reduce,
and reductions of its loop by group. A rank that is in its n-th gather cannot begin anything else; one that has begun a
backward pass or a reduction more than that, before its own n-th gather, needs the first to begin it too. So both are
there for good, however long either of them may otherwise take. Nothing here waits, reads a tensor or communicates.
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
    """What a rank has begun, as it tells the others; it is in the `number`-th reduction of `group`, if in one."""

    gathers: Count
    backwards: Count
    group: str = ""
    number: Count = 0


@dataclass(frozen=True)
class Waiting:
    """A rank in a gather: its number, and what this rank has begun before it, reductions by the name of their group."""

    gather: int
    backwards: int
    reductions: Mapping[str, int]

    def needed_by(self, told: Counts) -> str:
        """What the rank that told this is in, and cannot leave before this one leaves its gather; "" for nothing."""
        if told.gathers >= self.gather:
            return ""
        if told.backwards > self.backwards:
            return BACKWARD
        return REDUCTION if told.number > self.reductions.get(told.group, 0) else ""


class PendingCollectives:
    """The counts of one rank, kept by the thread that trains, and read by any other."""

    def __init__(self, ranks: Sequence[int]) -> None:
        """ranks: those that are watched together, by their number among all."""
        self.armed = False
        """Whether the next backward pass reduces: a forward pass of DDP has said so."""
        self._ranks = frozenset(ranks)
        self._parameters: frozenset[int] = frozenset()
        self._gathers, self._backwards = 0, 0
        self._reductions: Counter[str] = Counter()
        self._inside: tuple[str, int] | None = None
        self._waiting: Waiting | None = None
        self._whole: dict[str, bool] = {}
        self._owner = threading.get_ident()

    # what the loop does

    def follow(self, model: nn.Module) -> list[DistributedDataParallel]:
        """The modules in `model` whose backward passes reduce over all ranks; `forward` is to be told of each call."""
        modules = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
        found = [each for each in modules if self._ranks <= set(dist.get_process_group_ranks(each.process_group))]
        self._parameters = frozenset(id(p) for each in found for p in each.parameters())
        return found

    def forward(self, module: DistributedDataParallel) -> None:
        """A forward pass of a module that `follow` gave begins.

        What a communication hook does with the gradients, and with which ranks, is its own affair.
        """
        hooked = getattr(module, "_comm_hooks", ())
        if torch.is_grad_enabled() and module.require_backward_grad_sync and not hooked:
            self.armed = True

    def backward(self, parameter: nn.Parameter) -> None:
        """A backward pass has come to `parameter`, while `armed`."""
        if id(parameter) in self._parameters:
            self.armed = False
            self._backwards += 1

    def reducing(self, group: Any, *, waits: bool) -> None:
        """The loop reduces over `group` (None: all ranks). waits: until it is done, when `resumed` is called."""
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
        """The loop's reduction is done."""
        if threading.get_ident() == self._owner:
            self._inside = None

    def gathering(self) -> None:
        """A gather of ours begins."""
        self._gathers += 1
        # A forward pass may have been without a backward pass of what is watched: then there may be one more to come.
        backwards = self._backwards + self.armed
        self._waiting = Waiting(self._gathers, backwards, self._reductions)

    def gathered(self) -> None:
        """It is over."""
        self._waiting = None

    # what other threads ask

    @property
    def waiting(self) -> Waiting | None:
        """The gather that this rank is in; the same object as long as it is."""
        return self._waiting

    def told(self) -> Counts:
        """For the other ranks. The gathers are read last: what is said of the rest was so before they were more."""
        backwards, inside = self._backwards, self._inside or ("", 0)
        return Counts(self._gathers, backwards, *inside)


def stuck(waiting: Waiting, told: Mapping[int, Counts]) -> dict[int, str]:
    """The ranks that wait for the one that is `waiting`, which waits for them, each with what it is in.

    told: what each other rank told of itself last.
    """
    found = {rank: waiting.needed_by(each) for rank, each in told.items()}
    return {rank: what for rank, what in found.items() if what}
