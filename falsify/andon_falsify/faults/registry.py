"""All faults by name; a rank looks up here what it is to plant."""

from __future__ import annotations

from andon_falsify.faults import own_promises, seed_mutants
from andon_falsify.faults.planting import Fault

FAULTS: tuple[Fault, ...] = (
    *seed_mutants.MISSED,
    *seed_mutants.CAUGHT,
    *seed_mutants.ADDED,
    *own_promises.MEMORY,
    *own_promises.FAULTS,
)
"""Every fault, in the order of the matrix."""

_BY_NAME = {fault.name: fault for fault in FAULTS}


def named(name: str) -> Fault:
    """The fault of that name. Raises `KeyError`."""
    return _BY_NAME[name]
