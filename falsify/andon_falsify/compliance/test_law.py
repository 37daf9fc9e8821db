"""Gradient, loss, norm and update of every step against one process in float64 that shares no code with the trainer."""

from __future__ import annotations

import pytest

from andon_falsify.checkers import gradient_law, losses_close
from andon_falsify.claims.evidence import of_trace
from andon_falsify.claims.statements import NORM, UPDATE
from andon_falsify.claims.table import judged
from andon_falsify.compliance.plugin import Court
from andon_falsify.subjects.case import Case, make_rows
from andon_falsify.subjects.placing import room_for

CASES = {
    "decoder, AdamW, clipped": Case(epochs=2),
    "decoder, SGD": Case(optimizer="sgd", clip_norm=None, lr=0.05, class_weights=(0.5, 1.0, 2.0)),
    "encoder, SGD": Case(architecture="encoder", optimizer="sgd", clip_norm=None, lr=0.05),
    "every weight, AdamW": Case(rank=0, lr=1e-3, clip_norm=None),
    "two layers, one-row batches": Case(rows=make_rows(4), layers=2, batch_size=1, micro_batches=2),
}


@pytest.mark.claim("gradient-law", "losses-close", "norm-law", "update-law")
@pytest.mark.parametrize("name", CASES)
def test_every_update_is_that_of_the_law(court: Court, backend: str, name: str) -> None:
    """From the accused's weights before each update and his masks; label-sorted rows, ragged micro-batches (V1, V8)."""
    trace = court.run(CASES[name].but(backend=backend, world=room_for(backend, 3)))
    court.hold(*judged(of_trace(trace), (gradient_law.CLAIM, losses_close.CLAIM, NORM, UPDATE)).values())
