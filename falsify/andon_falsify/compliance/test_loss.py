"""A hundred updates and more: the loss is that of one process, to the bit, and that of float64 within a millionth."""

from __future__ import annotations

import pytest

from andon_falsify.checkers import losses_close
from andon_falsify.claims.between import same_bits
from andon_falsify.claims.of_trainer import alone
from andon_falsify.claims.trainer_law import TrainerLaw
from andon_falsify.compliance.plugin import Court
from andon_falsify.subjects.case import Case, make_rows
from andon_falsify.verdict import not_applicable

LONG = Case(rows=make_rows(20), batch_size=6, micro_batches=2, epochs=26)
"""Label-sorted; batches of 6, 6, 6 and 2 rows; 104 updates."""
CASES = {
    "AdamW, clipped": LONG.but(lr=2e-3),
    "SGD": LONG.but(optimizer="sgd", clip_norm=None, lr=0.02, weight_decay=0.0),
}
BOUND = 1e-6


@pytest.mark.claim("losses-close", "same-everywhere")
@pytest.mark.parametrize("name", CASES)
def test_the_loss_after_100_updates_is_that_of_one_process(court: Court, backend: str, name: str) -> None:
    """F-DP-005 and C-DP-001, with a rate that learns: what has learned nothing would agree by itself (V2, V22)."""
    case = CASES[name].but(backend=backend)
    trace, base = court.run(case), court.run(alone(case))
    reference = TrainerLaw(trace)
    if reference.why_not:
        court.hold(same_bits(base, trace), not_applicable(losses_close.CLAIM, reference.why_not))
        return
    law = [update.loss for update in reference.trajectory()]
    seen = [reported.loss for reported in trace.first.reported]
    assert law[-1] < 0.75 * law[0], f"nothing was learned: {law[0]} to {law[-1]}"
    court.hold(same_bits(base, trace), losses_close.check(seen, law, bound=BOUND))
