"""Without a GPU a run goes on on the CPU, says so, and gives the same (F-DP-004)."""

from __future__ import annotations

import pytest
import torch

from andon.backend.devices import placement
from andon_falsify.checkers import same_everywhere
from andon_falsify.compliance.claims import FALLBACK
from andon_falsify.compliance.functions import fallback
from andon_falsify.compliance.plugin import Court
from andon_falsify.subjects.case import Case
from andon_falsify.verdict import not_applicable


@pytest.mark.claim("cpu-fallback")
def test_a_run_that_was_to_use_gpus_goes_on_without(court: Court) -> None:
    """What is asked for, what is chosen, what is said; then a run on what was chosen has the bits of one on one CPU."""
    if torch.cuda.device_count():
        court.hold(not_applicable(FALLBACK, "this machine has a GPU"))
        return
    court.hold(fallback().verdict)
    backend, devices, note = placement("nccl", 2, None)
    assert "CPU" in note
    case = Case(world=len(devices), backend=backend)
    chosen, plain = court.run(case), court.run(case.but(world=1, backend="inline"))
    court.hold(same_everywhere.check([plain.seen, chosen.seen]))
