"""The flat gradient has the same tensors in the same order on every rank, backend and world size (F-HET-001)."""

from __future__ import annotations

import pytest

from andon_falsify.checkers import layout_equal
from andon_falsify.claims.evidence import of_trace
from andon_falsify.claims.one_run import layouts
from andon_falsify.compliance.plugin import Court
from andon_falsify.subjects.case import Case
from andon_falsify.subjects.placing import room_for


@pytest.mark.claim("layout-equal")
@pytest.mark.parametrize("architecture", ["decoder", "encoder"])
def test_the_layout_is_one(court: Court, backend: str, architecture: str) -> None:
    """Read from the addresses of the parameters after construction, on every rank, and against one inline rank."""
    case = Case(architecture=architecture, world=room_for(backend, 3), backend=backend)
    trace, alone = court.run(case), court.run(case.but(world=1, backend="inline"))
    both = {f"{backend} rank 0": trace.first.layouts[0], "inline": alone.first.layouts[0]}
    court.hold(layouts(of_trace(trace)), layout_equal.check(both))
