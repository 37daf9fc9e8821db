"""All faults of our trainer by name. A rank looks up the fault of its case here."""

from __future__ import annotations

from . import instructions, own_promises, preferences, seed_mutants
from .planting import Fault

FAULTS: tuple[Fault, ...] = (
    *seed_mutants.MISSED,
    *seed_mutants.CAUGHT,
    *seed_mutants.ADDED,
    *own_promises.MEMORY,
    *own_promises.FAULTS,
    *instructions.FAULTS,
    *preferences.FAULTS,
)

_BY_NAME = {fault.name: fault for fault in FAULTS}


def named(name: str) -> Fault:
    """The fault of that name. Raises `KeyError`."""
    return _BY_NAME[name]


def reference(fault: Fault) -> str:
    """The name of the fault in `Case.fault`."""
    return f"falsify.power.registry:{fault.name}"
