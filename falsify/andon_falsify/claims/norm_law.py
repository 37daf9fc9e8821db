"""Compares the norm that Andon's trainer reports for each update with the norm of the reference gradient."""

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
    reported, found = {each.step: each.norm for each in evidence.observed.first.reported}, []
    for law in evidence.law.expected:
        seen, what = reported[law.step], "the reported norm is not that of the float64 reference"
        if not abs(seen - law.norm) <= evidence.noise.norm * max(law.norm, FLOOR * law.summed):
            shown = (f"step {law.step}", f"{law.norm:.9g}", f"{seen:.9g}", seen / law.norm if law.norm else None)
            found.append(Counterexample(what, *shown, quantity="norm"))
    return conclude(CLAIM, len(evidence.law.expected), found)
