"""Every rank holds the same weights, optimizer state and counts after every update, and the base stays as it was."""

from __future__ import annotations

import pytest

from andon_falsify.checkers import replicas_agree
from andon_falsify.claims.evidence import of_trace
from andon_falsify.claims.update import base
from andon_falsify.compliance.plugin import Court
from andon_falsify.subjects.case import Case, make_rows

CASES = {
    "decoder, AdamW, clipped": Case(epochs=2),
    "encoder, SGD with momentum": Case(architecture="encoder", optimizer="sgd", momentum=0.9, clip_norm=None, lr=0.05),
    "every weight, SGD": Case(rank=0, optimizer="sgd", clip_norm=None, lr=0.05, weight_decay=0.0),
    "fewer rows than ranks": Case(rows=make_rows(7), batch_size=3, micro_batches=5),
}


@pytest.mark.claim("replicas-agree", "base-frozen")
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_all_ranks_hold_the_same_state_after_every_update(court: Court, backend: str, world: int, name: str) -> None:
    """Compared by SHA-256 of the tensors themselves, and by what the ledger says (C-DP-001, F-DP-001)."""
    trace = court.run(CASES[name].but(backend=backend, world=world))
    assert trace.ledger is not None
    court.hold(replicas_agree.check(trace.seen), replicas_agree.check(trace.ledger), base(of_trace(trace)))
