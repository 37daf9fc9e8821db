"""Without a GPU a run goes on on the CPU, says so, and gives the same (F-DP-004)."""

from __future__ import annotations

import pytest

from andon.backend.devices import placement
from andon_falsify.checkers import same_everywhere
from andon_falsify.claims.functions import fallback
from andon_falsify.compliance.plugin import Court
from andon_falsify.subjects.case import Case


@pytest.mark.claim("cpu-fallback")
def test_a_run_that_was_to_use_gpus_goes_on_without(court: Court) -> None:
    """What is chosen where there is no GPU, what is said; then a run on what was chosen has the bits of one on one CPU.

    The choice is a function of how many GPUs there are, so a machine that has some is asked as if it had none.
    """
    court.hold(fallback().verdict)
    backend, devices, note = placement("nccl", 2, None, 0)
    assert "CPU" in note
    case = Case(world=len(devices), backend=backend)
    chosen, plain = court.run(case), court.run(case.but(world=1, backend="inline"))
    court.hold(same_everywhere.check([plain.seen, chosen.seen]))
