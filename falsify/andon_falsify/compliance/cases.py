"""Cases that several compliance tests run, and in which the power suite plants its faults."""

from __future__ import annotations

from andon_falsify.subjects.case import Case, make_rows

SGD = Case(rows=make_rows(11), optimizer="sgd", lr=0.05, clip_norm=None, weight_decay=0.0)
"""Batches of 5, 5 and 1 rows on 2 ranks; without clipping and moments, which hide scale."""
ADAMW = Case(rows=make_rows(11))
MOMENTUM = SGD.but(momentum=0.9)
PLAIN = SGD.but(dropout=0.0)
"""Without dropout the law needs no masks: for faults that draw other masks, or compute other micro-batches."""
BIG = Case(
    rows=make_rows(40), batch_size=8, micro_batches=8, world=1, hidden=64, inner=128, rank=16, values=False, memory=True
)
"""Five updates of a model so large that the fixed cost of a digest does not hide a gradient or a base."""
