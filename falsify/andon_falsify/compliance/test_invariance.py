"""Whatever the case, the number of ranks does not enter its result: searched by hypothesis."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from andon_falsify.claims.of_trainer import alone, verdicts
from andon_falsify.compliance.plugin import Court
from andon_falsify.subjects.case import Case, make_rows
from andon_falsify.subjects.placing import room_for

EXAMPLES = max(4, settings().max_examples // 6)
"""Each example is two runs and a reference, so a sixth of what the profile gives a cheap property."""

_OPTIMIZERS = st.sampled_from(
    [("adamw", 0.5, 1e-2, 0.0), ("sgd", None, 0.05, 0.0), ("sgd", None, 0.02, 0.9), ("adamw", None, 3e-3, 0.0)]
)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Small cases: world sizes, batch sizes, ragged tails, class weights, seeds, with dropout and without."""
    optimizer, clip, rate, momentum = draw(_OPTIMIZERS)
    return Case(
        rows=make_rows(draw(st.integers(3, 11)), draw(st.integers(0, 3))),
        batch_size=draw(st.integers(1, 7)),
        micro_batches=draw(st.integers(1, 6)),
        max_steps=4,
        optimizer=optimizer,
        clip_norm=clip,
        lr=rate,
        momentum=momentum,
        seed=draw(st.integers(0, 5)),
        class_weights=draw(st.sampled_from([None, (1.0, 1.0, 1.0), (0.2, 1.0, 3.0), (1.0, 0.0, 2.0)])),
        architecture=draw(st.sampled_from(["decoder", "encoder"])),
        dropout=draw(st.sampled_from([0.1, 0.3, 0.0])),
        world=draw(st.integers(2, 4)),
    )


@pytest.mark.claim("same-everywhere", "replicas-agree", "gradient-law", "losses-close", "update-law", "plan-followed")
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(case=cases())
def test_one_result_for_every_world(court: Court, backend: str, case: Case) -> None:
    """Rows, loss, gradient, weights and optimizer state have the bits of one rank, and keep every law."""
    court.needs(backend, 2)
    trace = court.run(case.but(backend=backend, world=room_for(backend, case.world)))
    found = verdicts(trace, court.run(alone(trace.case)))
    # Four updates need not be an epoch, so that its visits may be open.
    del found["samples-once"]
    # Rows of one class whose weight is 0 have a gradient of 0, of which nothing can be told.
    court.hold(*(verdict for verdict in found.values() if "0 everywhere" not in verdict.why))
