"""Every kind of right loop, by name: what 1,000 steps of each must not make a watch say anything about."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from tests.watch import blind, clean_communication, clean_loops, clean_losses, clean_peers, clean_resumes, clean_variety
from tests.watch.clean import Kind, Seen
from tests.watch.clean_twins import planted
from tests.watch.watched import all_told

KINDS = {
    "plain loop, all lines told": Kind(all_told, ("transformers", "peft"), "heavy"),
    **clean_loops.KINDS,
    **clean_communication.KINDS,
    **clean_peers.KINDS,
    **clean_variety.KINDS,
    **clean_resumes.KINDS,
    **clean_losses.KINDS,
    **blind.KINDS,
}


def installed(kind: Kind) -> bool:
    return all(importlib.util.find_spec(name) is not None for name in kind.needs)


def run_kinds(names: Sequence[str], steps: int) -> dict[str, Seen]:
    return {name: KINDS[name].run(steps) for name in names}


def run_twin(name: str, fault: str, steps: int) -> Seen:
    with planted(fault):
        return KINDS[name].run(steps)


def unannounced(name: str, seen: Seen) -> tuple[str, ...]:
    """What was said of the kind beyond the suspicions that are announced of it, each once."""
    known = KINDS[name].suspected
    return (*seen.violations, *(said for said in seen.suspicions if said.partition(" ")[0] not in known))
