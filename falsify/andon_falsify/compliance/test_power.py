"""Every known fault is seen by the claim that names it; a suite that misses one is not to be believed."""

from __future__ import annotations

import pytest

from andon_falsify.compliance.power import Laboratory, untried
from andon_falsify.faults.registry import FAULTS, named

BY_BACKEND = [fault.name for fault in FAULTS if fault.kind in ("trainer", "resume")]
IN_PROCESS = [fault.name for fault in FAULTS if fault.kind == "coordinator"]
ANYWHERE = [fault.name for fault in FAULTS if fault.kind == "functions"]


@pytest.mark.parametrize("name", BY_BACKEND)
def test_a_planted_fault_is_killed(laboratory: Laboratory, backend: str, name: str) -> None:
    """It changes something, the clean run holds, and its claim falls; with the contracts on it is noticed."""
    if reason := untried(named(name), backend):
        pytest.skip(reason)
    assert laboratory.attempt(named(name), backend).problems == []


@pytest.mark.parametrize("place", ["inline", "threads"])
@pytest.mark.parametrize("name", IN_PROCESS)
def test_a_fault_of_the_coordinator_is_killed(laboratory: Laboratory, place: str, name: str) -> None:
    """The same for what only the seed's coordinator can get wrong."""
    assert laboratory.attempt(named(name), place).problems == []


@pytest.mark.parametrize("name", ANYWHERE)
def test_a_fault_of_a_function_is_killed(laboratory: Laboratory, name: str) -> None:
    """The same for the seed's free functions."""
    assert laboratory.attempt(named(name), "inline").problems == []
