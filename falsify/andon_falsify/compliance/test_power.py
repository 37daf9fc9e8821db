"""Every known fault is seen by the claim that names it; a suite that misses one is not to be believed."""

from __future__ import annotations

import pytest

from andon_falsify.compliance.power import Laboratory, untried
from andon_falsify.faults.registry import FAULTS, named

PLACES = {"coordinator": ("inline", "threads"), "functions": ("inline",)}
BY_BACKEND = [fault.name for fault in FAULTS if fault.kind not in PLACES]
IN_PROCESS = [(fault.name, place) for fault in FAULTS for place in PLACES.get(fault.kind, ())]


@pytest.mark.parametrize("name", BY_BACKEND)
def test_a_planted_fault_is_killed(laboratory: Laboratory, backend: str, name: str) -> None:
    """It changes something, and its claim falls for its reason and holds without it; contracts notice it too."""
    if reason := untried(named(name), backend):
        pytest.skip(reason)
    assert laboratory.attempt(named(name), backend).problems == []


@pytest.mark.parametrize(("name", "place"), IN_PROCESS)
def test_a_fault_of_the_seed_is_killed(laboratory: Laboratory, name: str, place: str) -> None:
    """The same for what only the seed's coordinator and free functions can get wrong."""
    assert laboratory.attempt(named(name), place).problems == []
