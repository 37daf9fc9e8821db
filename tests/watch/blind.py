"""The kinds of loops that were written without sight of the watch, and what they train with and without one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

import andon
from tests.watch import blind_kinds, blind_peers, blind_practice
from tests.watch.blind_models import Unwatched
from tests.watch.clean import Seen, ignore, seen_by

KINDS = {**blind_kinds.KINDS, **blind_practice.KINDS, **blind_peers.KINDS}


def weights_of(kinds: Iterable[str], steps: int) -> dict[str, list[torch.Tensor]]:
    """The parameters that each kind has trained after so many steps, without a watch."""
    return {kind: [p.detach().clone() for p in KINDS[kind](steps, Unwatched).parameters()] for kind in kinds}


def seen(kind: str, steps: int) -> Seen:
    """What a watch saw on this rank of the kind, of so many steps."""
    watches: list[Any] = []

    def opened(model: nn.Module, optimizer: Any, **lines: Any) -> Any:
        watches.append(andon.watch(model, optimizer, action=ignore, **lines))
        return watches[-1]

    KINDS[kind](steps, opened)
    return seen_by(*watches)


def seen_of(kinds: Iterable[str], steps: int) -> dict[str, Seen]:
    """The same of each kind."""
    return {kind: seen(kind, steps) for kind in kinds}
