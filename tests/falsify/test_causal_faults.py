"""Every fault of instruction tuning is seen by the check that is named for it, and nothing is seen without one."""

from __future__ import annotations

import pytest

from andon_falsify.faults.causal import CONTROLS, FAULTS, CausalFault, attempt
from andon_falsify.subjects.causal import CausalCase

REASONS = {
    "start": "gives packed rows other logits than each row alone",
    "inside": "content-planned",
    "law": "a gradient is off by",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_check_named_for_a_fault_kills_it(fault: CausalFault) -> None:
    """By its own reason, and not by an accident on the way."""
    assert REASONS[fault.killer] in attempt(fault.case, fault.plant)[fault.killer]


@pytest.mark.parametrize("case", CONTROLS, ids=lambda case: f"{case.family}-{case.packed}")
def test_nothing_is_seen_without_a_fault(case: CausalCase) -> None:
    """Afterwards too: a fault is gone when its attempt is over."""
    assert not any(attempt(case).values())
