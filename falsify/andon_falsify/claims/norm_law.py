"""The norm that our trainer reports of every update against that of the law's gradient."""

from __future__ import annotations

from andon_falsify.claims.evidence import Evidence, has_law, tensors
from andon_falsify.claims.gradient_law import FLOOR
from andon_falsify.verdict import Claim, Clause, Counterexample, Verdict, conclude

CLAIM = Claim(
    "norm-law",
    1,
    "The reported norm is that of the correct reduced gradient before clipping.",
    order=150,
    subjects=("trainer",),
    needs=(tensors("norm of a reference", of_updates=True), has_law),
    clauses=(Clause("clip-once"),),
)


def check(evidence: Evidence) -> Verdict:
    reported = {each.step: each.norm for each in evidence.observed.first.reported}
    found = []
    for expected in evidence.law.expected:
        norm, seen = expected.norm, reported[expected.step]
        if not abs(seen - norm) <= evidence.noise.norm * max(norm, FLOOR * expected.summed):
            what, where = "the reported norm is not that of the law", f"step {expected.step}"
            ratio = seen / norm if norm else None
            found.append(Counterexample(what, where, f"{norm:.9g}", f"{seen:.9g}", ratio, quantity="norm"))
    return conclude(CLAIM, len(evidence.law.expected), found)
