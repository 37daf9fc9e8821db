"""Every known fault is seen by the claim that names it; a suite that misses one is not to be believed."""

from __future__ import annotations

import pytest

from andon_falsify.subjects.trace import Remembering
from falsify.power.laboratory import Laboratory, untried
from falsify.power.registry import FAULTS, named

OF_THE_SEED = [fault.name for fault in FAULTS if fault.kind == "coordinator"]
BY_BACKEND = [fault.name for fault in FAULTS if fault.name not in OF_THE_SEED]


pytestmark = pytest.mark.usefixtures("runner")  # it counts the runs, and has `backend` be each backend in turn


@pytest.fixture(scope="session")
def laboratory(subject: Remembering) -> Laboratory:
    """Plants faults in our trainer, and keeps the runs without them for the whole session."""
    return Laboratory(subject)


@pytest.mark.parametrize("name", BY_BACKEND)
def test_a_planted_fault_is_killed(laboratory: Laboratory, backend: str, name: str) -> None:
    """It changes something, and its claim falls for its reason and holds without it; contracts notice it too."""
    if reason := untried(named(name), backend):
        pytest.skip(reason)
    assert laboratory.attempt(named(name), backend).problems == []


@pytest.mark.parametrize("name", OF_THE_SEED)
def test_a_fault_of_the_seed_is_killed(laboratory: Laboratory, name: str) -> None:
    """The same for what only the seed's coordinator can get wrong."""
    assert laboratory.attempt(named(name), "inline").problems == []
