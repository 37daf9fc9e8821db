"""No frozen weight and no buffer changes in a run."""

from __future__ import annotations

from andon_falsify.claims.evidence import Evidence, tensors
from andon_falsify.verdict import Claim, Clause, Counterexample, Verdict, conclude, first_of_many

CLAIM = Claim(
    "base-frozen",
    1,
    "No frozen weight or buffer changes on any rank.",
    order=160,
    subjects=("trainer", "loop"),
    needs=(tensors("frozen tensors"),),
    clauses=(Clause("base-frozen", "same"), Clause("parameters-kept")),
)


def check(evidence: Evidence) -> Verdict:
    """Compare each rank's frozen tensors at the start and the end. A loop may train no other tensor of the model."""
    frozen = {rank: pair for rank, pair in sorted(evidence.observed.gathered("frozen").items()) if pair[1]}
    found = [
        Counterexample("a frozen weight changed", f"rank {rank}", start, end, quantity="weights")
        for rank, (start, end) in frozen.items()
        if start != end
    ]
    if evidence.of_loop and (extra := evidence.loop_law.made_trainable - evidence.loop_law.to_train):
        what, named = f"{len(extra)} frozen tensors of the model are trained", first_of_many(sorted(extra), 3)
        found.append(Counterexample(what, "from the start", "frozen", named, quantity="weights"))
    return conclude(CLAIM, len(frozen), found)
