"""The kinds of loops that were written without sight of the watch, and what they train with and without one."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

import andon
from tests.watch import blind_kinds, blind_peers, blind_practice
from tests.watch.blind_models import Unwatched
from tests.watch.clean import Kind, Seen, ignore, seen_by

LOOPS = {**blind_kinds.KINDS, **blind_practice.KINDS, **blind_peers.KINDS}
SUSPECTED = {
    "gossip": "replicas-agree",
    "outer_optimizer": "replicas-agree",
    "thawed_from_the_top": "parameters-kept",
    "group_added": "parameters-kept",
    "wasserstein_pair": "gradient-present",
    "learned_to_learn": "samples-once",
}
"""What docs/watch.md announces of them, one suspicion each: weights part for a while, layers are unfrozen, the loss
does not depend on the critic's last bias, the tasks of all ranks have the same inputs."""


def weights_of(loops: Iterable[str], steps: int) -> dict[str, list[torch.Tensor]]:
    """The parameters that each loop has trained after so many steps, without a watch."""
    return {name: [p.detach().clone() for p in LOOPS[name](steps, Unwatched).parameters()] for name in loops}


def _seen(name: str, steps: int) -> Seen:
    watches: list[Any] = []

    def opened(model: nn.Module, optimizer: Any, **lines: Any) -> Any:
        watches.append(andon.watch(model, optimizer, action=ignore, **lines))
        return watches[-1]

    LOOPS[name](steps, opened)
    return seen_by(*watches)


KINDS = {
    f"blind: {name}": Kind(
        partial(_seen, name), weight="many", suspected=frozenset(each for each in [SUSPECTED.get(name)] if each)
    )
    for name in LOOPS
}
"""By the names that the benchmark gives them."""
